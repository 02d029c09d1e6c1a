"""The simulator against the real engine: calibrate this machine, predict a run, make the run, compare.

    python benchmarks/simulator_vs_engine.py --out benchmarks/results/simulator_vs_engine.json

Every policy serves the same requests (prompts of 8 to 160 tokens, outputs from the Azure trace scaled down), first on
the virtual clock, then on SmolLM2. Errors are (predicted - measured) / measured.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from cbref import Engine, SamplingParams, calibrate
from cbref.executors.roofline import RooflineExecutor
from cbref.hardware import MODELS
from cbref.workloads import AZURE, Workload, serve

POLICIES = {"static": {}, "orca": {}, "sarathi": {"max_num_batched_tokens": 64}}
COMPARED = {
    "seconds": lambda s: s["seconds"],
    "tbt p50": lambda s: s["tbt"]["p50"],
    "tbt p99": lambda s: s["tbt"]["p99"],
    "ttft p50": lambda s: s["ttft"]["p50"],
}


def workload(requests: int, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    quantiles = AZURE["conv"]["output"]
    outputs = np.interp(rng.random(requests), np.linspace(0, 1, len(quantiles)), quantiles) / 16
    prompts = [rng.integers(1, 49_000, n).tolist() for n in rng.integers(8, 160, requests)]
    params = [SamplingParams(max_tokens=max(1, round(n)), ignore_eos=True) for n in outputs]
    return Workload(prompts, params, [0.0] * requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write JSON here; without it, print it")
    args = parser.parse_args()

    real = Engine.from_pretrained("smollm2-135m", max_batch_size=args.slots).executor
    machine = calibrate(real)
    work = workload(args.requests, args.seed)
    report = {}
    for policy, options in tqdm(POLICIES.items(), unit="policy"):
        executor = RooflineExecutor(
            MODELS["smollm2-135m"], machine, real.num_blocks, real.block_size, real.max_model_len
        )
        predicted = Engine(executor, policy, max_num_seqs=args.slots, **options)
        forecast = predicted.summary(serve(predicted, work))
        engine = Engine(real, policy, max_num_seqs=args.slots, **options)
        measured = engine.summary(serve(engine, work))
        assert forecast["steps"] == measured["steps"]  # the same scheduler: only time can differ
        report[policy] = {"steps": measured["steps"]} | {
            name: {"predicted": of(forecast), "measured": of(measured), "error": of(forecast) / of(measured) - 1}
            for name, of in COMPARED.items()
        }
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"cpu": platform.machine(), "threads": torch.get_num_threads()},
        "setting": {"model": "smollm2-135m", "dtype": "float32", "requests": args.requests, "slots": args.slots},
        "calibration": {k: v for k, v in asdict(machine).items() if v},
        "policies": report,
    }
    text = json.dumps(result, indent=2)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
