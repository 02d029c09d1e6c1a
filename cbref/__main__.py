"""The command line: ``python -m cbref generate | compare``."""

from __future__ import annotations

import argparse
import json
import sys

from tabulate import tabulate

from cbref.engine import Engine
from cbref.request import SamplingParams
from cbref.schedulers import POLICIES
from cbref.workloads import chat


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"cbref: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def generate(args) -> int:
    """Stream one prompt as it comes; several side by side, each printed when it is finished."""
    engine = _engine(args, args.policy)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, stop=args.stop)
    prompts = [[{"role": "user", "content": p}] for p in args.prompts] if args.chat else args.prompts
    texts = [""] * len(prompts)
    requests: dict[str, int] = {}
    for event in engine.stream(prompts, params):
        number = requests.setdefault(event.request_id, len(requests))
        if len(prompts) == 1:
            print(event.text, end="", flush=True)
        else:
            texts[number] += event.text
            print(
                f"[{number}] {event.text}" if args.interleave else "", end="\n" if args.interleave else "", flush=True
            )
            if event.finish_reason and not args.interleave:
                print(f"[{number}] {args.prompts[number]}{texts[number]}\n", flush=True)
    if len(prompts) == 1:
        print()
    return 0


def compare(args) -> int:
    """Serve the same requests under each policy, on one model, one after the other."""
    work = chat(args.requests, seed=args.seed or 0, scale=args.scale)
    first = _engine(args, args.policies[0])
    first.generate(
        work.prompts[:2], SamplingParams(max_tokens=2), progress=False
    )  # the first pass allocates and is slow
    rows = {}
    for policy in args.policies:
        engine = Engine(first.executor, policy, max_num_seqs=args.max_batch_size)
        rows[policy] = engine.summary(engine.generate(work.prompts, work.params, progress=not args.quiet))
    result = {"model": args.model, "max_batch_size": args.max_batch_size, "seed": args.seed or 0, "policies": rows}
    if args.json == "-":
        print(json.dumps(result, indent=2))
        return 0
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
    columns = (
        "policy",
        "steps",
        "tokens",
        "tokens/s",
        "occupancy",
        "TTFT p50",
        "TTFT p99",
        "TBT p50",
        "TBT p99",
        "e2e p50",
    )
    table = [
        (
            policy,
            s["steps"],
            s["output_tokens"],
            f"{s['tokens_per_second']:.1f}",
            f"{s['occupancy']:.0%}",
            *(
                _seconds(s[m][p])
                for m, p in (("ttft", "p50"), ("ttft", "p99"), ("tbt", "p50"), ("tbt", "p99"), ("e2e", "p50"))
            ),
        )
        for policy, s in rows.items()
    ]
    print(f"{args.requests} requests, {args.max_batch_size} slots, {args.model}")
    print(tabulate(table, headers=columns, disable_numparse=True, colalign=("left", *["right"] * (len(columns) - 1))))
    return 0


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def _engine(args, policy: str) -> Engine:
    return Engine.from_pretrained(
        args.model, policy, args.max_batch_size, dtype=args.dtype, device=args.device, seed=args.seed
    )


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--model", default="smollm2-135m", help="a name, a folder, or a Hugging Face hub name (default: %(default)s)"
    )
    common.add_argument(
        "--max-batch-size", type=int, default=8, metavar="N", help="most requests served at once (default: %(default)s)"
    )
    common.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="precision (default: float32 on a CPU)"
    )
    common.add_argument("--device", help="cpu, cuda, cuda:1, … (default: a GPU if there is one)")
    common.add_argument("--seed", type=int, help="makes the run repeatable")

    parser = argparse.ArgumentParser(
        prog="python -m cbref", description="Serve a language model with continuous batching."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    g = commands.add_parser(
        "generate",
        parents=[common],
        help="complete prompts, streaming",
        description="Complete prompts with a real model. One prompt streams; several are served in one batch.",
    )
    g.add_argument("prompts", nargs="+", metavar="PROMPT")
    g.add_argument(
        "--policy", default="orca", choices=sorted(POLICIES), help="scheduling policy (default: %(default)s)"
    )
    g.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="most tokens of an answer (default: %(default)s)"
    )
    g.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)")
    g.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text; may be given again"
    )
    g.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    g.add_argument("--interleave", action="store_true", help="with several prompts: print every token as it is made")
    g.set_defaults(run=generate)

    c = commands.add_parser(
        "compare",
        parents=[common],
        help="serve the same requests under several policies",
        description="Serve the same requests under each policy and print what it took: steps, tokens per second, "
        "share of slots in use, time to first token (TTFT), time between tokens (TBT), end to end (e2e).",
    )
    c.add_argument(
        "--policies",
        nargs="+",
        default=["static", "orca"],
        choices=sorted(POLICIES),
        metavar="POLICY",
        help=f"any of {', '.join(sorted(POLICIES))} (default: static orca)",
    )
    c.add_argument("--requests", type=int, default=32, metavar="N", help="number of requests (default: %(default)s)")
    c.add_argument(
        "--scale",
        type=float,
        default=0.125,
        metavar="X",
        help="output lengths, as a share of those in the Azure conversation trace (default: %(default)s)",
    )
    c.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the figures as JSON to FILE, or instead of the table",
    )
    c.add_argument("--quiet", action="store_true", help="no progress bar")
    c.set_defaults(run=compare)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
