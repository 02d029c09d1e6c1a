"""Kernels and engine on this machine, in one run of under five minutes: right, how fast, against whom, as predicted?

    python benchmarks/gpu.py

Needs the repository and nothing else: weights are random, in the shape of Llama 3.2 1B. On a GPU the result goes to
benchmarks/results/gpu-<its name>.json. Without one, what needs no GPU is run in tiny sizes, with Triton's interpreter,
and the rest is listed as not run. Exit code 1 if a check or a part failed; a missed target is no failure.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

import torch

# Before Triton is imported. On a GPU also against a setting in the environment: interpreted kernels would be timed.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from gpu import engine, kernels, simulator, steps
from gpu.machine import Machine
from gpu.parts import Part, as_json, run_parts, table, tracebacks
from report import header, write

PARTS = [
    *(Part(f"check {name}", kernels.correctness(name), 12 if "attention" in name else 4) for name in kernels.CHECKS),
    Part("peaks", kernels.peaks, 3),
    Part("decode speed", kernels.decode_speed, 5),
    Part("prefill speed", kernels.prefill_speed, 5),
    Part("mixed speed", kernels.mixed_speed, 5),
    Part("check backends", steps.backends_agree, 10),
    Part("check waiting", steps.no_host_waits, 10),
    Part("engine speed", engine.speed, 60),
    Part("simulator", simulator.fidelity, 30),
    Part("flex speed", kernels.flex_speed, 30),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="parts whose names contain one of these"
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="parts that do not fit are listed as not run")
    parser.add_argument("--out", type=Path, help="where the JSON goes; without it and without a GPU, nowhere")
    args = parser.parse_args()
    parts = [part for part in PARTS if any(name in part.name for name in args.only)]
    if not parts:
        parser.error(f"no part's name contains {' or '.join(args.only)}; there are: {', '.join(p.name for p in PARTS)}")

    begin, machine = time.perf_counter(), Machine()
    result = {**header("torch", "triton", "transformers"), "gpu": machine.describe(), "minutes": args.minutes}
    torch.manual_seed(0)
    report = run_parts(parts, machine, 60 * args.minutes)
    result |= {"seconds": time.perf_counter() - begin, "parts": as_json(report)}
    print(f"{result['gpu']['name'] if result['gpu'] else 'no GPU: tiny sizes, for correctness only'}\n")
    print(table(report))
    failed = [name for name, part in report.items() if part["status"] == "failed"]
    for name in failed:
        print(f"\n{name} failed", *tracebacks(report[name]), sep="\n", file=sys.stderr)
    if args.out is None and result["gpu"]:
        name = re.sub("[^a-z0-9]+", "-", result["gpu"]["name"].lower()).strip("-")
        args.out = Path(__file__).parent / "results" / f"gpu-{name}.json"
    if args.out is not None:
        write(result, args.out)
        print(f"\nwritten to {args.out}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
