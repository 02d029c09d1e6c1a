"""A whole hour of the Azure conversation trace on a simulated H100, once under each policy of the chapter.

    python benchmarks/conv_trace.py FOLDER_OR_CSV --out cbref/recorded/conv_trace.json

Requests arrive at their recorded times. All times in the result are of the simulated clock, so the same code gives the
same figures on every machine; only date, machine and versions differ. The trace (Patel et al., Splitwise, ISCA 2024; CC
BY 4.0) is not part of this project. The result goes with the package, since a chapter prints from it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from report import AZURE_TRACE, header, write

from cbref import Engine
from cbref.metrics import SLO
from cbref.workloads import Workload, read_azure_csv, serve

TRACE = "AzureLLMInferenceTrace_conv.csv"
SOURCE = {
    "what": "a simulation: the whole Azure conversation trace of 2023, at its recorded times, under each policy",
    **AZURE_TRACE,
    "left_out": "other percentiles; the times of single requests",
    "command": "python benchmarks/conv_trace.py FOLDER_OR_CSV --out cbref/recorded/conv_trace.json",
}
SETTING = {"model": "llama-3-8b", "hardware": "h100", "slots": 128}
LIMITS = SLO(ttft=2.0, tbt=0.1)
POLICIES = {
    "static": ("static", {}),
    "orca": ("orca", {}),
    "prefill_first": ("prefill_first", {}),
    "sglang": ("sglang", {}),
    "trtllm": ("trtllm", {}),
    "vllm_v1 8192": ("vllm_v1", {"max_num_batched_tokens": 8192}),
    "sarathi 2048": ("sarathi", {"max_num_batched_tokens": 2048}),
    "sarathi 512": ("sarathi", {"max_num_batched_tokens": 512}),
}


def run(work: Workload, title: str, progress: bool = True) -> dict:
    """Serve the work under one of ``POLICIES``; its figures, rounded. Seconds, and shares of one."""
    policy, options = POLICIES[title]
    machine = {"model": SETTING["model"], "hardware": SETTING["hardware"], "record": False}
    engine = Engine.simulated(policy, SETTING["slots"], **machine, **options)
    s = engine.summary(serve(engine, work, progress=progress), LIMITS)
    latencies = {
        f"{name}_{point}": round(s[name][point], 5) for name in ("ttft", "tbt", "e2e") for point in ("p50", "p99")
    }
    return {
        "steps": s["steps"], "seconds": round(s["seconds"], 2), "preemptions": s["preemptions"], **latencies,
        "attainment": round(s["slo"]["attainment"], 5), "goodput": round(s["goodput"], 4),
        **{name: round(s[name], 4) for name in ("occupancy", "mfu", "mbu")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help=f"a trace in the Azure format, or the folder of {TRACE}")
    parser.add_argument("--limit", type=int, help="only so many requests, from the first on")
    parser.add_argument("--out", type=Path, help="write JSON here; without it, print it")
    args = parser.parse_args()

    file = args.trace / TRACE if args.trace.is_dir() else args.trace
    work = read_azure_csv(file, args.limit)
    hours = work.arrivals[-1] / 3600
    trace = {"file": file.name, "requests": len(work), "hours": round(hours, 3)}
    trace |= {"requests_per_second": round(len(work) / hours / 3600, 3)}
    setting = {**SETTING, "slo": {"ttft": LIMITS.ttft, "tbt": LIMITS.tbt}}
    result = {**SOURCE, **header("numpy"), "trace": trace, "setting": setting}
    result["policies"] = {title: run(work, title) for title in POLICIES}
    write(result, args.out)


if __name__ == "__main__":
    main()
