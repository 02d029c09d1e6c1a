"""The same requests three ways on one model in one run: cbref static, cbref orca, transformers' `generate()`.

    python benchmarks/static_vs_orca.py --out benchmarks/results/static_vs_orca.json

`generate()` gets the requests in batches of the same size, left-padded, in the same order, and runs each batch to its
longest request, as it must. Its outputs are cut to what each request asked for before tokens are counted. Rounds are
interleaved, so that a machine that slows down slows all three; the ratios are taken from medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from report import header, write
from tqdm import tqdm

from cbref import Engine, SamplingParams
from cbref.attention import NAME
from cbref.workloads import Workload, chat


def run_cbref(executor, policy: str, slots: int, work: Workload) -> tuple[dict, list[list[int]]]:
    engine = Engine(executor, policy, max_num_seqs=slots)
    begin = time.perf_counter()
    completions = engine.generate(work.prompts, work.params, progress=False)
    seconds = time.perf_counter() - begin
    summary = engine.summary(completions)
    return {**summary, "seconds": seconds, "tokens_per_second": summary["output_tokens"] / seconds}, [
        c.token_ids for c in completions
    ]


@torch.inference_mode()
def run_transformers(model, tokenizer, slots: int, work: Workload) -> tuple[dict, list[list[int]]]:
    model.set_attn_implementation("sdpa")
    outputs, passes = [], 0
    begin = time.perf_counter()
    for first in range(0, len(work), slots):
        batch = tokenizer(
            work.prompts[first : first + slots], return_tensors="pt", padding=True, padding_side="left"
        ).to(model.device)
        wanted = [p.max_tokens for p in work.params[first : first + slots]]
        longest = max(wanted)
        # eos_token_id -1: like `ignore_eos`, no token ends a request
        out = model.generate(
            **batch, max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=tokenizer.eos_token_id
        )
        passes += longest
        outputs += [row[:n].tolist() for row, n in zip(out[:, batch["input_ids"].shape[1] :], wanted, strict=True)]
    seconds = time.perf_counter() - begin
    model.set_attn_implementation(NAME)
    tokens = sum(map(len, outputs))
    return {
        "steps": passes,
        "output_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--scale", type=float, default=0.125, help="output lengths as a share of the Azure conversation trace's"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", help="default: float32 on a CPU")
    parser.add_argument("--out", type=Path, help="write JSON here; without it, print it")
    args = parser.parse_args()

    work = chat(args.requests, seed=args.seed, scale=args.scale)
    executor = Engine.from_pretrained(args.model, "orca", args.slots, dtype=args.dtype).executor
    model, tokenizer = executor.model, executor.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    ways = {
        "static": lambda w: run_cbref(executor, "static", args.slots, w),
        "orca": lambda w: run_cbref(executor, "orca", args.slots, w),
        "transformers_generate": lambda w: run_transformers(model, tokenizer, args.slots, w),
    }
    warm = Workload(
        work.prompts[: args.slots], [SamplingParams(max_tokens=4, ignore_eos=True)] * args.slots, [0.0] * args.slots
    )
    for way in ways.values():
        way(warm)
    rounds: dict[str, list[dict]] = {name: [] for name in ways}
    outputs = {}
    for _ in tqdm(range(args.rounds), unit="round"):
        for name, way in ways.items():
            figures, outputs[name] = way(work)
            rounds[name].append(figures)
    speed = {name: statistics.median(r["tokens_per_second"] for r in runs) for name, runs in rounds.items()}
    result = {
        **header("torch", "transformers"),
        "device": torch.cuda.get_device_name() if executor.device.type == "cuda" else "cpu",
        "setting": {
            "model": args.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "requests": args.requests,
            "slots": args.slots,
            "scale": args.scale,
            "seed": args.seed,
        },
        "same_outputs": {name: outputs[name] == outputs["orca"] for name in ways},
        "median_tokens_per_second": speed,
        "ratios": {f"orca / {name}": speed["orca"] / speed[name] for name in ways if name != "orca"},
        "steps": {name: runs[0]["steps"] for name, runs in rounds.items()},
        "rounds": rounds,
    }
    write(result, args.out)


if __name__ == "__main__":
    main()
