"""What the simulator costs: a synthetic trace at 1, 10 and 100 times its length, and a recorded one if given.

    python benchmarks/simulator_speed.py --csv TRACE.csv \\
        --out benchmarks/results/simulator_speed.json

Stall-free scheduling of Llama-3-8B on one H100. Times are CPU seconds of this process, memory the growth of what Python
holds; both in one run, so that their ratios mean something.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from pathlib import Path

from report import header, write

from cbref import Engine
from cbref.workloads import Workload, azure, read_azure_csv, serve


def run(work: Workload) -> dict:
    engine = Engine.simulated("sarathi", 128, model="llama-3-8b", hardware="h100", record=False)
    begin = time.process_time()
    requests = serve(engine, work)
    seconds = time.process_time() - begin
    tokens = sum(len(r.output) for r in requests)
    return {
        "requests": len(requests), "output_tokens": tokens, "steps": engine.num_steps, "cpu_seconds": round(seconds, 2),
        "requests_per_cpu_second": round(len(requests) / seconds, 1),
        "microseconds_per_token": round(1e6 * seconds / tokens, 2),
        "simulated_seconds": round(engine.executor.now(), 1),
    }  # fmt: skip


def peak_of_the_engine(requests: int) -> float:
    """Bytes that a run of so many equal requests adds at its peak, beyond the requests themselves and their times."""
    engine = Engine.simulated("sarathi", 128, model="llama-3-8b", hardware="h100", record=False)
    work = azure("conv", requests, rate=6.0)
    tracemalloc.start()
    served = serve(engine, work)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    own = sum(r.token_times.buffer_info()[1] * r.token_times.itemsize + 8 * len(r.output) for r in served)
    return peak - own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="a trace in the Azure format")
    parser.add_argument("--base", type=int, default=100, help="requests of the synthetic trace at 1x (default: 100)")
    parser.add_argument("--out", type=Path, help="write JSON here; without it, print it")
    args = parser.parse_args()

    result = header()
    result["synthetic"] = {f"{k}x": run(azure("conv", k * args.base, rate=6.0)) for k in (1, 10, 100)}
    per_token = [r["microseconds_per_token"] for r in result["synthetic"].values()]
    result["cost_per_token_100x_over_10x"] = round(per_token[2] / per_token[1], 3)
    if args.csv:
        result[args.csv.stem] = run(read_azure_csv(args.csv))
    few, many = peak_of_the_engine(200), peak_of_the_engine(400)
    result["memory"] = {"kilobytes_at_200_requests": round(few / 1024), "kilobytes_at_400_requests": round(many / 1024)}
    write(result, args.out)


if __name__ == "__main__":
    main()
