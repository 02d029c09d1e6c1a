"""The command line: ``python -m cbref generate | compare | simulate``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tabulate import tabulate

from cbref.engine import Engine
from cbref.export import chrome_trace
from cbref.hardware import HARDWARE, MODELS
from cbref.metrics import SLO, RequestMetrics
from cbref.request import SamplingParams
from cbref.schedulers import POLICIES
from cbref.workloads import AZURE, DOCUMENT, azure, chat, of_lengths, read_azure_csv, serve


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
    """Stream one prompt as it comes; several are served in one batch, each printed when it is finished."""
    engine = _engine(args, args.policy)
    _say_what_was_chosen(engine)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, stop=args.stop)
    prompts = [[{"role": "user", "content": p}] for p in args.prompts] if args.chat else args.prompts
    texts: dict[str, list[str]] = {}
    for event in engine.stream(prompts, params):
        if len(prompts) == 1:
            print(event.text, end="", flush=True)
            continue
        texts.setdefault(event.request_id, []).append(event.text)
        if event.finish_reason:
            number = int(event.request_id)  # the engine numbers requests in the order of the prompts
            print(f"[{number}] {args.prompts[number]}{''.join(texts[event.request_id])}\n", flush=True)
    if len(prompts) == 1:
        print()
    return 0


def compare(args) -> int:
    """Serve the same requests under each policy, on one model, one after the other."""
    work = chat(args.requests, seed=args.seed or 0, scale=args.scale)
    first = _engine(args, args.policies[0])
    first.generate(work.prompts[:2], SamplingParams(max_tokens=2), progress=False)  # the first pass allocates, is slow
    rows = {}
    for policy in args.policies:
        engine = Engine(first.executor, policy, max_num_seqs=args.max_batch_size)
        rows[policy] = engine.summary(engine.generate(work.prompts, work.params, progress=not args.quiet))
    setting = {"model": args.model, "requests": args.requests, "scale": args.scale}
    title = f"{args.requests} requests, {args.max_batch_size} slots, {args.model}"
    _say_what_was_chosen(first)
    return _report(args, title, setting | {"attention": first.executor.attention_choice}, rows)


def simulate(args) -> int:
    """Serve one workload under each policy on a virtual clock."""
    policies = args.policy or ["prefill_first", "sarathi"]
    slo = SLO(args.slo_ttft, args.slo_tbt)
    work = _workload(args)
    rows, served, steps = {}, {}, {}
    for policy in policies:
        engine = Engine.simulated(
            policy, args.max_batch_size, model=args.model, hardware=args.hardware, tp=args.tp, record=bool(args.trace)
        )
        served[policy] = serve(engine, work, progress=not args.quiet)
        rows[policy], steps[policy] = engine.summary(served[policy], slo), engine.steps
    if args.trace:
        chrome_trace(steps, args.trace)
    if args.plot:
        from cbref.plots import latencies

        metrics = {policy: [RequestMetrics.of(r) for r in requests] for policy, requests in served.items()}
        latencies(metrics).savefig(args.plot, dpi=150)
    setting = {
        "model": args.model,
        "hardware": args.hardware,
        "tp": args.tp,
        "workload": Path(args.csv).name if args.csv else args.workload,
    }
    gpus = f"{args.tp} × {args.hardware}"
    title = f"{len(work)} requests, {args.max_batch_size} slots, {args.model} on {gpus}, simulated"
    return _report(args, title, {**setting, "rate": args.rate}, rows)


def _workload(args):
    if args.csv:
        work = read_azure_csv(args.csv, args.requests)
        return work.at_rate(args.rate) if args.rate else work
    if args.workload in DOCUMENT:
        return of_lengths(DOCUMENT[args.workload], prompt_length=100)
    return azure(args.workload.removeprefix("azure-"), args.requests or 1000, args.rate, args.seed or 0, args.cv)


COLUMNS = {
    "steps": lambda s: s["steps"],
    "tokens": lambda s: s["output_tokens"],
    "tokens/s": lambda s: f"{s['tokens_per_second']:.1f}",
    "occupancy": lambda s: f"{s['occupancy']:.0%}",
    "TTFT p50": lambda s: _seconds(s["ttft"]["p50"]),
    "TTFT p99": lambda s: _seconds(s["ttft"]["p99"]),
    "TBT p50": lambda s: _seconds(s["tbt"]["p50"]),
    "TBT p99": lambda s: _seconds(s["tbt"]["p99"]),
    "e2e p50": lambda s: _seconds(s["e2e"]["p50"]),
    "preempted": lambda s: s["preemptions"],
    "in SLO": lambda s: f"{s['slo']['attainment']:.0%}" if "slo" in s else None,
    "MFU": lambda s: f"{s['mfu']:.0%}" if s.get("mfu") is not None else None,
}


def _report(args, title: str, setting: dict, rows: dict[str, dict]) -> int:
    """Print the table; with --json write everything that was measured, to a file or in place of the table."""
    if args.json:
        setting = {**setting, "max_batch_size": args.max_batch_size, "seed": args.seed or 0}
        text = json.dumps({"setting": setting, "policies": rows}, indent=2)
        if args.json == "-":
            print(text)
            return 0
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    cells = {name: [cell(row) for row in rows.values()] for name, cell in COLUMNS.items()}
    cells = {name: column for name, column in cells.items() if None not in column}
    print(title)
    print(tabulate({"policy": list(rows), **cells}, headers="keys", colalign=["left", *["right"] * len(cells)]))
    return 0


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def _engine(args, policy: str) -> Engine:
    kernels = {"attention": args.attention, "use_kernels": args.use_kernels}
    place = {"dtype": args.dtype, "device": args.device}
    return Engine.from_pretrained(args.model, policy, args.max_batch_size, seed=args.seed, **place, **kernels)


def _say_what_was_chosen(engine: Engine) -> None:
    print(f"attention: {engine.executor.attention_choice}", file=sys.stderr)


def _common(max_batch_size: int) -> argparse.ArgumentParser:
    """A new one for each command: parsers with one parent share its defaults."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--seed", type=int, help="makes the run repeatable")
    common.add_argument("--max-batch-size", type=int, default=max_batch_size, metavar="N", help="most requests served at once (default: %(default)s)")  # fmt: skip # noqa: E501
    return common


def _parser() -> argparse.ArgumentParser:
    policies = ", ".join(POLICIES)
    report = argparse.ArgumentParser(add_help=False)
    report.add_argument("--json", nargs="?", const="-", metavar="FILE", help="all figures as JSON, to FILE or instead of the table")  # fmt: skip # noqa: E501
    report.add_argument("--quiet", action="store_true", help="no progress bar")
    real = argparse.ArgumentParser(add_help=False)
    real.add_argument("--model", default="smollm2-135m", help="a name, a folder, or a Hugging Face hub name (default: %(default)s)")  # fmt: skip # noqa: E501
    real.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on a CPU")
    real.add_argument("--device", help="cpu, cuda, cuda:1, … (default: a GPU if there is one)")

    real.add_argument("--attention", choices=("torch", "triton", "triton_mixed"), help="default: triton on a GPU, else torch")  # fmt: skip # noqa: E501
    real.add_argument("--use-kernels", action="store_true", help="Triton kernels for RMSNorm and rotary embedding too")

    parser = argparse.ArgumentParser(
        prog="python -m cbref", description="Serve a language model with continuous batching."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    g = commands.add_parser(
        "generate", parents=[real, _common(8)], help="complete prompts with a real model, streaming",
        description="Complete prompts with a real model. One prompt streams; several are served in one batch.",
    )  # fmt: skip
    g.add_argument("prompts", nargs="+", metavar="PROMPT")
    g.add_argument("--policy", default="orca", choices=POLICIES, metavar="POLICY", help=f"one of {policies} (default: %(default)s)")  # fmt: skip # noqa: E501
    g.add_argument("--max-tokens", type=int, default=64, metavar="N", help="most tokens of an answer (default: %(default)s)")  # fmt: skip # noqa: E501
    g.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)")
    g.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end an answer before this text; may be given again")  # fmt: skip # noqa: E501
    g.add_argument("--chat", action="store_true", help="put the prompts through the model's chat template")
    g.set_defaults(run=generate)

    c = commands.add_parser(
        "compare", parents=[real, _common(8), report], help="serve the same requests under several policies",
        description="Serve the same requests with a real model under each policy and print what it took: steps, tokens "
        "per second, share of slots in use, time to first token (TTFT), time between tokens (TBT), end to end (e2e).",
    )  # fmt: skip
    c.add_argument("--policies", nargs="+", default=["static", "orca"], choices=POLICIES, metavar="POLICY", help=f"any of {policies} (default: static orca)")  # fmt: skip # noqa: E501
    c.add_argument("--requests", type=int, default=32, metavar="N", help="number of requests (default: %(default)s)")
    c.add_argument("--scale", type=float, default=0.125, metavar="X", help="output lengths, as a share of those in the Azure conversation trace (default: %(default)s)")  # fmt: skip # noqa: E501
    c.set_defaults(run=compare)

    s = commands.add_parser(
        "simulate", parents=[_common(128), report], help="serve a workload on a simulated GPU under several policies",
        description="Serve a workload on a simulated GPU under each policy, on a virtual clock.",
    )  # fmt: skip
    s.add_argument("--policy", action="append", choices=POLICIES, metavar="POLICY", help=f"one of {policies}; may be given again (default: prefill_first and sarathi)")  # fmt: skip # noqa: E501
    s.add_argument("--workload", default="azure-conv", choices=[*(f"azure-{k}" for k in AZURE), *DOCUMENT], help="default: %(default)s")  # fmt: skip # noqa: E501
    s.add_argument("--csv", metavar="FILE", help="a trace in the Azure format, instead of --workload")
    s.add_argument("--requests", type=int, metavar="N", help="number of requests (default: 1000; with --csv: all)")
    s.add_argument("--rate", type=float, metavar="R", help="requests a second (default: all at once; with --csv: as recorded)")  # fmt: skip # noqa: E501
    s.add_argument("--cv", type=float, default=1.0, help="how bursty arrivals are; 1 is Poisson (default: %(default)s)")
    s.add_argument("--model", default="llama-3-8b", choices=MODELS, help="default: %(default)s")
    s.add_argument("--hardware", default="h100", choices=HARDWARE, help="default: %(default)s")
    s.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs that share each layer (default: %(default)s)")
    s.add_argument("--slo-ttft", type=float, default=2.0, metavar="S", help="limit for goodput, seconds (default: %(default)s)")  # fmt: skip # noqa: E501
    s.add_argument("--slo-tbt", type=float, default=0.1, metavar="S", help="limit for goodput, seconds (default: %(default)s)")  # fmt: skip # noqa: E501
    s.add_argument("--trace", metavar="FILE", help="write the steps as a Chrome trace, for Perfetto")
    s.add_argument("--plot", metavar="FILE", help="write the distributions of TTFT and TBT as a picture")
    s.set_defaults(run=simulate)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
