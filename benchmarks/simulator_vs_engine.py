"""The simulator against the real engine: calibrate this machine, predict a run, make the run, compare.

    python benchmarks/simulator_vs_engine.py --out benchmarks/results/simulator_vs_engine.json

Every policy serves the same requests (prompts of 8 to 160 tokens, outputs from the Azure trace scaled down) on SmolLM2
and on the virtual clock. A shared machine changes its speed from minute to minute, which no model of it can know. So
calibrations and runs alternate over some rounds; the prediction comes from the median of the calibrations and is held
against the median of the runs. Errors are (predicted - measured) / measured.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from report import header, write
from tqdm import tqdm

from cbref import Engine, SamplingParams, calibrate
from cbref.calibration import MeasuredHardware
from cbref.executors.roofline import RooflineExecutor
from cbref.hardware import MODELS
from cbref.workloads import AZURE, Workload, draw_lengths, serve

POLICIES = {"static": {}, "orca": {}, "sarathi": {"max_num_batched_tokens": 64}}
COMPARED = {
    "seconds": lambda s: s["seconds"],
    "tbt p50": lambda s: s["tbt"]["p50"],
    "tbt p99": lambda s: s["tbt"]["p99"],
    "ttft p50": lambda s: s["ttft"]["p50"],
}

FITTED = (
    "tokens", "seconds", "overhead", "per_decode_step", "per_decode", "per_context", "per_chunk", "per_pair",
)  # fmt: skip


def median(machines: list[MeasuredHardware]) -> MeasuredHardware:
    """A machine whose every figure is the median of these machines'."""
    seconds = tuple(float(np.median(column)) for column in zip(*(m.seconds for m in machines), strict=True))
    return replace(
        machines[0], seconds=seconds, **{k: float(np.median([getattr(m, k) for m in machines])) for k in FITTED[2:]}
    )


def workload(requests: int, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    outputs = draw_lengths(AZURE["conv"]["output"], requests, rng) / 16
    prompts = [rng.integers(1, 49_000, n).tolist() for n in rng.integers(8, 160, requests)]
    params = [SamplingParams(max_tokens=max(1, round(n)), ignore_eos=True) for n in outputs]
    return Workload(prompts, params, [0.0] * requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write JSON here; without it, print it")
    args = parser.parse_args()

    real = Engine.from_pretrained("smollm2-135m", max_batch_size=args.slots).executor
    work = workload(args.requests, args.seed)
    machines, runs = [], {policy: [] for policy in POLICIES}
    for _ in tqdm(range(args.rounds), unit="round"):
        machines.append(calibrate(real, repeat=2))
        for policy, options in POLICIES.items():
            engine = Engine(real, policy, max_num_seqs=args.slots, **options)
            runs[policy].append(engine.summary(serve(engine, work)))
    machine, report = median(machines), {}
    for policy, options in POLICIES.items():
        twin = RooflineExecutor(MODELS["smollm2-135m"], machine, real.num_blocks, real.block_size, real.max_model_len)
        engine = Engine(twin, policy, max_num_seqs=args.slots, **options)
        forecast = engine.summary(serve(engine, work))
        assert {s["steps"] for s in runs[policy]} == {forecast["steps"]}  # the same scheduler: only time can differ
        report[policy] = {"steps": forecast["steps"]}
        for name, of in COMPARED.items():
            predicted, measured = of(forecast), [of(s) for s in runs[policy]]
            error = predicted / float(np.median(measured)) - 1
            report[policy][name] = {"predicted": predicted, "measured": measured, "error": error}
    result = {
        **header("torch", "transformers"),
        "setting": {"model": "smollm2-135m", "dtype": "float32", "requests": args.requests, "slots": args.slots},
        "calibrations": [{k: asdict(m)[k] for k in FITTED} for m in machines],
        "policies": report,
    }
    write(result, args.out)


if __name__ == "__main__":
    main()
