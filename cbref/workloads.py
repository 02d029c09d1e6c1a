"""Requests to serve: what arrives, when, and how long its answer will be."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from cbref.request import Request, SamplingParams, Status

# The source document's three examples, as numbers of output tokens a request. All arrive at once.
DOCUMENT = {"convoy": (10, 25, 15, 100), "interactive": (4, 2, 6, 3, 5, 2), "scheduler": (5, 10, 15, 20, 25, 30)}

# Percentiles of prompt and output tokens in the Azure LLM inference trace 2023 (19,366 conversation and 8,819 code
# requests). Patel et al., Splitwise, ISCA 2024; data CC-BY 4.0. The tail is thin: without the shares between 95 and 100
# %, a straight line to the longest request would make the mean prompt of a conversation a fifth too long.
AZURE_PERCENT = (*range(0, 100, 5), 97.5, 99, 99.9, 100)
# fmt: off
AZURE = {
    "conv": {
        "prompt": (2, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189, 1315, 1876, 2734,
                   4083, 4092, 4142, 6179, 14050),
        "output": (7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 522, 601,
                   954, 1000),
    },
    "code": {
        "prompt": (3, 75, 147, 232, 386, 578, 770, 939, 1075, 1261, 1469, 1690, 1909, 2164, 2433, 2744, 3192, 3920,
                   5188, 7303, 7435, 7436, 7437, 7437),
        "output": (6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 55, 90, 145, 251, 825, 1899),
    },
}
# fmt: on
AZURE_CONV_OUTPUT = AZURE["conv"]["output"]

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "A recipe for tomato soup: first,",
    "The three laws of thermodynamics say that",
    "Dear customer, thank you for your letter. We",
    "def fibonacci(n):",
    "The difference between a virus and a bacterium is that",
    "In 1969, two people walked on the Moon. They",
)


@dataclass(frozen=True)
class Workload:
    """Prompts with their parameters, and arrival times in seconds, in the order of arrival."""

    prompts: list[str] | list[Sequence[int]]
    params: list[SamplingParams]
    arrivals: list[float]

    def __len__(self) -> int:
        return len(self.prompts)

    def at_rate(self, rate: float) -> Workload:
        """The same requests with arrival times stretched or compressed to ``rate`` requests a second on average."""
        span = self.arrivals[-1] - self.arrivals[0]
        factor = (len(self) - 1) / rate / span if span else 0.0
        return replace(self, arrivals=[factor * (a - self.arrivals[0]) for a in self.arrivals])


def of_lengths(output_lengths: Sequence[int], prompt_length: int = 1) -> Workload:
    """Requests of the given output lengths with made-up prompts, all at time 0: for simulated engines."""
    return _made_up([prompt_length] * len(output_lengths), output_lengths, [0.0] * len(output_lengths))


def chat(num_requests: int = 32, seed: int = 0, scale: float = 0.125) -> Workload:
    """Real prompts, all at time 0, with output lengths drawn from the Azure conversation trace times ``scale``.

    The default scale brings a median of 129 tokens to 16, for laptops. Outputs run to their length (``ignore_eos``), so
    that every policy does the same work.
    """
    if num_requests < 1 or not scale > 0:
        raise ValueError(f"{num_requests} requests at scale {scale}; both must be above 0")
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, np.rint(scale * draw_lengths(AZURE_CONV_OUTPUT, num_requests, rng)).astype(int))
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(num_requests)]
    params = [SamplingParams(max_tokens=int(n), ignore_eos=True) for n in lengths]
    return Workload(prompts, params, [0.0] * num_requests)


def azure(kind: str, num_requests: int, rate: float | None = None, seed: int = 0, cv: float = 1.0) -> Workload:
    """Made-up prompts with lengths drawn from a trace of the Azure service; prompt and output independently.

    kind  "conv" or "code"
    rate  requests a second on average; None: all at time 0
    cv    coefficient of variation of the gaps between arrivals: 1 is Poisson, above 1 comes in bursts (Gamma)
    """
    if kind not in AZURE:
        raise ValueError(f"unknown trace {kind!r}; choose one of {', '.join(AZURE)}")
    if num_requests < 1 or (rate is not None and not rate > 0) or not cv > 0:
        raise ValueError(f"num_requests {num_requests}, rate {rate} and cv {cv} must be above 0")
    rng = np.random.default_rng(seed)
    prompts = np.rint(draw_lengths(AZURE[kind]["prompt"], num_requests, rng)).astype(int).tolist()
    outputs = np.rint(draw_lengths(AZURE[kind]["output"], num_requests, rng)).astype(int).tolist()
    if rate is None:
        return _made_up(prompts, outputs, [0.0] * num_requests)
    gaps = rng.gamma(1 / cv**2, cv**2 / rate, num_requests)
    return _made_up(prompts, outputs, (np.cumsum(gaps) - gaps[0]).tolist())


def read_azure_csv(path: str | Path, limit: int | None = None) -> Workload:
    """A trace in the Azure format (TIMESTAMP, ContextTokens, GeneratedTokens); ``ValueError`` names a bad line."""
    prompts, outputs, times = [], [], []
    with open(path, newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        columns = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
        if missing := columns - set(rows.fieldnames or ()):
            raise ValueError(f"{path}, line 1: no column {', '.join(sorted(missing))}")
        for row in rows:
            try:
                # the traces have seven digits after the point; datetime takes six
                times.append(datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp())
                prompts.append(_positive(row["ContextTokens"]))
                outputs.append(_positive(row["GeneratedTokens"]))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {rows.line_num}: {error}") from None
            if len(times) == limit:
                break
    if not times:
        raise ValueError(f"{path} holds no requests")
    order = sorted(range(len(times)), key=times.__getitem__)
    zero = min(times)
    return _made_up([prompts[i] for i in order], [outputs[i] for i in order], [times[i] - zero for i in order])


def serve(engine, work: Workload, *, clients: int | None = None, progress: bool = True) -> list[Request]:
    """Serve a workload to its end; returns its requests.

    Open loop (``clients`` None): requests arrive at their times, whatever the engine does. Closed loop: so many
    clients, each sending its next request when it has its answer; arrival times are not used.
    """
    begin = engine.executor.now()
    items = iter(zip(work.prompts, work.params, work.arrivals, strict=True))
    quiet = {} if progress else {"disable": True}

    def submit(count: int | None) -> list[Request]:
        """The next ``count`` requests, now; or all that are left, each at its time."""
        return [
            engine.add_request(prompt, params, arrival=begin + arrival if count is None else None)
            for prompt, params, arrival in islice(items, count)
        ]

    requests = submit(clients)
    with tqdm(total=len(work), unit="req", desc="serve", delay=2, **quiet) as bar:
        active = requests  # of a closed loop
        while engine.has_work:
            events = engine.step()
            if clients is not None:
                active = [r for r in active if r.status is not Status.FINISHED]
                fresh = submit(clients - len(active))
                requests.extend(fresh)
                active.extend(fresh)
            bar.update(sum(event.finish_reason is not None for event in events))
    return requests


def _made_up(prompt_lengths, output_lengths, arrivals) -> Workload:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in output_lengths]
    apart = 1 << 24  # no two prompts begin alike: a prefix cache has nothing to find
    return Workload([range(apart * i, apart * i + n) for i, n in enumerate(prompt_lengths)], params, list(arrivals))


def draw_lengths(quantiles: Sequence[int], size: int, rng: np.random.Generator) -> np.ndarray:
    """Random lengths [size] (floats) that follow a row of ``AZURE``, with straight lines between its percentiles."""
    return np.interp(100 * rng.random(size), AZURE_PERCENT, quantiles)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{value} tokens; it must be at least 1")
    return value
