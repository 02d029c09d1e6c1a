"""The interactive "policy race": the same twenty requests under four policies, two of them on one clock."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import traitlets

from cbref import strings as texts
from cbref.engine import Engine
from cbref.request import SamplingParams
from cbref.widgets.static import StaticTwin, source
from cbref.workloads import Workload, azure, serve

POLICIES = {"static": {}, "orca": {}, "prefill_first": {}, "sarathi": {"max_num_batched_tokens": 512}}
RATES = (4.0, 8.0, 16.0)  # requests a second
REQUESTS, SEED, SLOTS, MODEL, GPU = 20, 3, 8, "llama-3-8b", "a100"
SCALE = 0.25  # of the trace's output lengths: or the race is an hour of decodes
UNIT = 1e-5  # seconds; times go to the page as integers of these
FIGURES = (("ttft", "p50"), ("ttft", "p99"), ("tbt", "p99"))  # and the total time


class Race(StaticTwin):
    """Twenty requests with the lengths of the Azure conversation trace, served by two policies on a simulated GPU.

    Args:
        policies: the two that are shown at first; the reader can change them. Among static, orca, prefill_first,
            sarathi.
        rate: requests a second at first; the reader can change it. One of 4, 8, 16.
        clock: where the clock stands at first, in seconds; None: at the end.
        language: of the texts; see `cbref.strings.load`.

    Raises:
        ValueError: a value is out of range; the message names it and the limit.
    """

    kind = "race"
    _esm = source("dom.js", "parts.js", "race.js")
    _css = source("theme.css", "parts.css", "race.css")

    left = traitlets.Unicode().tag(sync=True)
    right = traitlets.Unicode().tag(sync=True)
    rate = traitlets.Int().tag(sync=True)
    clock = traitlets.Int().tag(sync=True)  # milliseconds
    setting = traitlets.Dict().tag(sync=True)
    requests = traitlets.List().tag(sync=True)  # [prompt, output] in tokens
    traces = traitlets.Dict().tag(sync=True)
    strings = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        policies: tuple[str, str] = ("prefill_first", "sarathi"),
        rate: float = 8,
        clock: float | None = None,
        language: str | None = None,
    ):
        left, right = _pair(policies)
        traces = {str(round(r)): {name: _trace(name, r) for name in POLICIES} for r in RATES}
        end = _end([traces[str(_rate(rate))][name] for name in (left, right)])
        super().__init__(
            left=left,
            right=right,
            rate=_rate(rate),
            clock=end if clock is None else min(end, _clock(clock, 1000)),
            setting={"count": REQUESTS, "slots": SLOTS, "budget": POLICIES["sarathi"]["max_num_batched_tokens"]},
            requests=[list(lengths) for lengths in _lengths()],
            traces=traces,
            strings=texts.load("race", language),
        )

    @traitlets.validate("left", "right", "rate", "clock")
    def _check(self, proposal):
        name, value = proposal["trait"].name, proposal["value"]
        if name == "rate":
            return _rate(value)
        return _clock(value, 1) if name == "clock" else _policy(value)

    def summary(self) -> str:
        runs = self.traces[str(self.rate)]
        parts = []
        for name in (self.left, self.right):
            worst = max(gap for tokens in _times(runs[name]) for gap in np.diff(tokens)) * UNIT * 1e3
            values = {"total": f"{runs[name]['figures'][-1]:.2f}", "worst": f"{worst:.0f}"}
            parts.append(self.strings["summary_side"].format(policy=self.strings[f"policy_{name}"], **values))
        return self.strings["summary"].format(
            requests=REQUESTS, rate=self.rate, sides=self.strings["list_separator"].join(parts)
        )

    def picture(self) -> str:
        say = {key: html.escape(text) for key, text in self.strings.items()}
        runs, setting = self.traces[str(self.rate)], say["setting"].format(**self.setting)
        heads = "".join(f'<th scope="col">{say[f"column_{key}"]}</th>' for key in ("ttft_p50", "ttft_p99", "tbt_p99"))
        rows = [
            f'<tr><th scope="row">{say[f"policy_{name}"]}</th>'
            + "".join(f"<td>{1e3 * value:,.0f}</td>" for value in run["figures"][:-1])
            + f"<td>{run['figures'][-1]:.2f}</td></tr>"
            for name, run in runs.items()
        ]
        return "\n".join(
            [
                f'<div class="cbp cbr cbr-picture" lang="{say["lang"]}">',
                f'<p class="cbp-muted">{setting}</p>',
                *(self._drawn(name, runs, say) for name in (self.left, self.right)),
                f'<p class="cbp-muted">{say["picture_note"]}</p>',
                f'<div class="cbp-scroll"><table><caption>{say["results"].format(rate=self.rate)}</caption>',
                f'<thead><tr><th scope="col">{say["column_policy"]}</th>{heads}'
                f'<th scope="col">{say["column_total"]}</th></tr></thead><tbody>',
                *rows,
                "</tbody></table></div>\n</div>",
            ]
        )

    def _drawn(self, name: str, runs: dict, say: dict) -> str:
        """One policy's lanes as the module draws them, at a width of 640."""
        width, row, lane = 640, 10, 7
        end = _end([runs[self.left], runs[self.right]]) / 1e3 / UNIT
        shapes = []
        for number, (request, tokens) in enumerate(zip(runs[name]["requests"], _times(runs[name]), strict=True)):
            arrival, admitted, _, finished = request[:4]
            x = [round(width * at / end, 1) for at in (arrival, admitted, tokens[0], tokens[-1], finished)]
            y = number * row
            shapes += [
                f'<path class="cbr-wait" d="M{x[0]} {y + 3.5}H{x[1]}"/>',
                f'<rect class="cbr-prefill" x="{x[1]}" y="{y + 1}" width="{max(1, x[2] - x[1]):.1f}" height="5"/>',
                f'<path class="cbr-held" d="M{x[3]} {y + 3.5}H{x[4]}"/>' if x[4] > x[3] else "",
                f'<path class="cbr-token" d="{"".join(f"M{width * at / end:.1f} {y}v{lane}" for at in tokens)}"/>',
            ]
        title = say["caption"].format(policy=say[f"policy_{name}"], end=f"{runs[name]['figures'][-1]:.2f}")
        return "\n".join(
            [
                f'<p class="cbr-name">{title}</p>',
                f'<svg viewBox="0 0 {width} {REQUESTS * row}" role="img" aria-label="{title}">',
                *filter(None, shapes),
                "</svg>",
            ]
        )


# ------------------------------------------------------------------ the runs


@cache
def _work(rate: float) -> Workload:
    work = azure("conv", REQUESTS, 1.0, seed=SEED)
    outputs = [max(2, round(SCALE * params.max_tokens)) for params in work.params]
    return replace(work, params=[SamplingParams(max_tokens=n, ignore_eos=True) for n in outputs]).at_rate(rate)


def _lengths() -> list[tuple[int, int]]:
    work = _work(RATES[0])
    return [(len(prompt), params.max_tokens) for prompt, params in zip(work.prompts, work.params, strict=True)]


@cache
def _trace(policy: str, rate: float) -> dict:
    """One run. ``steps``: length of each; ``idle``: [step, pause before it]; a request: arrival, admission, step of
    the first token, time of leaving, and runs of steps [first, behind the last] in which it gets a token each."""
    engine = Engine.simulated(policy, SLOTS, model=MODEL, hardware=GPU, **POLICIES[policy])
    requests = serve(engine, _work(rate), progress=False)
    begins = [round(step.begin / UNIT) for step in engine.steps]
    ends = [round(step.end / UNIT) for step in engine.steps]
    at = {step.end: step.index for step in engine.steps}
    rows = []
    for r in requests:
        steps = [at[time] for time in r.token_times]
        breaks = [i for i in range(1, len(steps)) if steps[i] != steps[i - 1] + 1]
        edges = [0, *breaks, len(steps)]
        runs = [[steps[a], steps[b - 1] + 1] for a, b in pairwise(edges)]
        rows.append([round(r.arrival / UNIT), round(r.admitted / UNIT), steps[0], round(r.finished / UNIT), runs])
    summary = engine.summary(requests)
    pauses = [[i, begin - end] for i, (begin, end) in enumerate(zip(begins, [0, *ends], strict=False)) if begin > end]
    return {
        "steps": [end - begin for begin, end in zip(begins, ends, strict=True)],
        "idle": pauses,
        "requests": rows,
        "figures": [*(summary[kind][point] for kind, point in FIGURES), summary["seconds"]],
    }


def _times(run: dict) -> list[list[int]]:
    """When each request gets its tokens, in UNITs, from the compact form above."""
    pauses, ends, now = dict(run["idle"]), [], 0
    for i, length in enumerate(run["steps"]):
        now += pauses.get(i, 0) + length
        ends.append(now)
    return [[ends[i] for start, stop in request[4] for i in range(start, stop)] for request in run["requests"]]


def _end(runs: Sequence[dict]) -> int:
    """Where the clock of these runs stops, in milliseconds: when the last is done, in whole ticks of at most 200."""
    longest = max(run["figures"][-1] for run in runs) * 1e3
    tick = 10 * math.ceil(longest / 2000)
    return tick * math.ceil(longest / tick)


# ------------------------------------------------------------------ arguments


def _policy(value) -> str:
    if not isinstance(value, str) or value not in POLICIES:
        raise ValueError(f"a policy must be one of {', '.join(POLICIES)}, got {value!r}")
    return value


def _pair(value) -> tuple[str, str]:
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(pair) != 2:
        raise ValueError(f"policies must be two of {', '.join(POLICIES)}, got {value!r}")
    if _policy(pair[0]) == _policy(pair[1]):
        raise ValueError(f"policies must be two different ones, got {value!r}")
    return pair[0], pair[1]


def _rate(value) -> int:
    if isinstance(value, bool) or value not in RATES:
        raise ValueError(f"rate must be one of {', '.join(f'{rate:g}' for rate in RATES)}, got {value!r}")
    return int(value)


def _clock(value, scale: int) -> int:
    """Milliseconds, from a number of which ``scale`` make one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value * scale <= 60_000:
        unit = "seconds" if scale == 1000 else "milliseconds"
        raise ValueError(f"clock must be from 0 to {60_000 // scale} {unit}, got {value!r}")
    return round(value * scale)
