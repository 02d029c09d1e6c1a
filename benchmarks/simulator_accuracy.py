"""The simulator against measurements that others made on real GPUs: how far off is the roofline?

    python benchmarks/simulator_accuracy.py FOLDER --out benchmarks/results/simulator_accuracy.json

Data (not part of this project): Splitwise (Patel et al., ISCA 2024; MIT), prompt and token times of whole models; Vidur
(Agrawal et al., MLSys 2024; MIT), linear layers by number of tokens. For each GPU and data set the efficiency factors
(MFU, MBU, overhead of a step, all-reduce rate and latency) are fitted on every other point and judged on those in
between.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from report import header, write
from tqdm import tqdm

from cbref.hardware import HARDWARE, MODELS, Hardware

GPUS = {"a100-80gb": "a100", "h100-80gb": "h100"}
VIDUR = {
    "vidur_a100_llama3_8b_mlp.csv": ("llama-3-8b", "a100"),
    "vidur_h100_llama2_7b_mlp.csv": ("llama-2-7b", "h100"),
    "vidur_h100_llama2_70b_mlp.csv": ("llama-2-70b", "h100"),
}
LAYER_PARTS = (
    "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "post_attention_layernorm", "mlp_up_proj",
    "mlp_act", "mlp_down_proj", "add",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One measured time (seconds), and how a ``Hardware`` predicts it."""

    group: str  # what is fitted together
    model: str
    tp: int
    kind: str  # "prompt", "token" or "linear"
    size: int  # tokens in the step
    seconds: float
    predict: Callable[[Hardware], float]


def splitwise(path: Path) -> list[Point]:
    times = defaultdict(list)
    for row in csv.DictReader(path.open()):
        if row["hardware"] in GPUS:
            key = row["model"].replace("llama2", "llama-2"), GPUS[row["hardware"]], int(row["tensor_parallel"])
            shape = int(row["prompt_size"]), int(row["batch_size"]), int(row["token_size"])
            times["prompt", *key, *shape[:2], 0].append(float(row["prompt_time"]))
            times["token", *key, *shape].append(float(row["token_time"]))
    points = []
    for (kind, model, gpu, tp, prompt, batch, output), values in sorted(times.items()):
        shape = MODELS[model]

        def predict(hw, kind=kind, shape=shape, prompt=prompt, batch=batch, output=output):
            tokens = prompt * batch if kind == "prompt" else batch
            seconds = hw.fixed_seconds(shape, tokens) + hw.linear_seconds(shape, tokens) + hw.head_seconds(shape, batch)
            if kind == "prompt":
                return seconds + batch * hw.chunk_attention_seconds(shape, 0, prompt)
            return seconds + hw.kv_read_seconds(shape, batch * (prompt + output // 2))

        size = prompt * batch if kind == "prompt" else batch
        points.append(Point(f"splitwise {gpu}", model, tp, kind, size, statistics.median(values) / 1e3, predict))
    return points


def vidur(folder: Path) -> list[Point]:
    points = []
    for file, (model, gpu) in VIDUR.items():
        times = defaultdict(list)
        for row in csv.DictReader((folder / file).open()):
            layer = sum(float(row[f"time_stats.{part}.median"] or 0) for part in LAYER_PARTS)
            times[int(row["num_tensor_parallel_workers"]), int(row["num_tokens"])].append(layer)
        for (tp, tokens), values in sorted(times.items()):
            seconds = statistics.median(values) * MODELS[model].layers / 1e3

            def predict(hw, shape=MODELS[model], tokens=tokens):
                return hw.overhead + hw.linear_seconds(shape, tokens)  # communication was not in the measurement

            points.append(Point(f"vidur {gpu} {model}", model, tp, "linear", tokens, seconds, predict))
    return points


def errors(points: list[Point], hw: Hardware) -> np.ndarray:
    return np.array([p.predict(replace(hw, tp=p.tp)) / p.seconds - 1 for p in points])


# Values to try for each factor.
FACTORS = {
    "mfu": np.linspace(0.1, 1.0, 46),
    "mbu": np.linspace(0.1, 1.0, 46),
    "overhead": np.array([0, *np.geomspace(1e-4, 0.04, 40)]),
    "link": np.geomspace(5e9, 1e12, 40),
    "sync": np.array([0, *np.geomspace(1e-6, 1e-3, 30)]),
}


def fit(points: list[Point], gpu: Hardware) -> Hardware:
    """The factors with the least mean absolute logarithmic error, improved one at a time until none gets better."""

    def loss(hw: Hardware) -> float:
        return float(np.abs(np.log1p(errors(points, hw))).mean())

    best, factors = gpu, [name for name in FACTORS if name not in ("link", "sync") or points[0].kind != "linear"]
    for _ in range(8):
        before = best
        for name in factors:
            best = min([best, *(replace(best, **{name: float(value)}) for value in FACTORS[name])], key=loss)
        if best == before:
            break
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the measured CSV files lie")
    parser.add_argument("--out", type=Path, help="write JSON here; without it, print it")
    args = parser.parse_args()
    points = splitwise(args.folder / "splitwise_perf_model.csv") + vidur(args.folder)
    groups = defaultdict(list)
    for p in points:
        groups[p.group].append(p)
    report = {**header(), "groups": {}}
    for name, members in tqdm(groups.items(), unit="group"):
        gpu = HARDWARE[name.split()[1]]
        fitted = fit(members[::2], gpu)
        held_out = members[1::2]
        off = np.abs(errors(held_out, fitted))
        parts = defaultdict(list)
        for p, error in zip(held_out, off, strict=True):
            size = "small" if p.size <= 64 else "medium" if p.size <= 2048 else "large"
            parts[f"{p.model} tp{p.tp}"].append(error)
            parts[f"{p.kind} {size}"].append(error)
        report["groups"][name] = {
            "fitted": {
                "mfu": round(fitted.mfu, 3), "mbu": round(fitted.mbu, 3),
                "overhead_ms": round(1e3 * fitted.overhead, 3),
                "link_gb_per_s": None if np.isinf(fitted.link) else round(fitted.link / 1e9, 1),
                "sync_us": round(1e6 * fitted.sync, 1),
            },
            "points": {"fit": len(members[::2]), "held out": len(held_out)},
            "median_error": round(float(np.median(off)), 4),
            "p90_error": round(float(np.percentile(off, 90)), 4),
            "median_error_unfitted": round(float(np.median(np.abs(errors(held_out, gpu)))), 4),
            "median_error_by": {part: round(float(np.median(values)), 4) for part, values in sorted(parts.items())},
        }  # fmt: skip
    write(report, args.out)


if __name__ == "__main__":
    main()
