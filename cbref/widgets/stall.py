"""The interactive "stall": a long prompt arrives among decodes, and a token budget decides who waits for whom."""

import html
from functools import cache
from itertools import pairwise

import traitlets

from cbref import strings as texts
from cbref.engine import Engine
from cbref.hardware import HARDWARE, MODELS
from cbref.request import SamplingParams, Status
from cbref.widgets.static import StaticTwin, integer, source

MODEL, GPU = "llama-3-8b", "h100"
DECODES, CONTEXT, PROMPT = 30, 2000, 50_000
BUDGETS = (None, 8192, 4096, 2048, 1024, 512, 256)  # tokens in a step; None: prefill first
BEFORE, AFTER = 12, 12  # steps shown before the prompt arrives and after its first token
SLO = (5, 3000)  # ms
_SLO_STOPS = (5, 8, 10, 12, 15, 20, 25, 30, 35, 40, 50, 60, 70, 80, 100, 120, 150, 200, 250, 300, 400, 500, 700, 1000)
_SLO_STOPS += (1500, 2000, 3000)


class Stall(StaticTwin):
    """A prompt of 50,000 tokens arrives beside 30 decodes: their tokens on a time line, for each token budget.

    Args:
        budget: tokens in a step, one of `BUDGETS`. None: no budget, and the prompt goes first.
        slo: how long a gap between two tokens of a decode may be, in ms.
        language: of the texts; see `cbref.strings.load`.

    Raises:
        ValueError: a value is out of range; the message names it and the limit.
    """

    kind = "stall"
    _esm = source("dom.js", "parts.js", "stall.js")
    _css = source("theme.css", "parts.css", "stall.css")

    budget = traitlets.Int(allow_none=True).tag(sync=True)
    slo = traitlets.Int().tag(sync=True)
    data = traitlets.Dict().tag(sync=True)
    strings = traitlets.Dict().tag(sync=True)

    def __init__(self, budget: int | None = None, slo: int = 100, language: str | None = None):
        slo = _slo(slo)
        super().__init__(budget=_budget(budget), slo=slo, data=_data(slo), strings=texts.load("stall", language))

    @traitlets.validate("budget", "slo")
    def _check(self, proposal):
        return {"budget": _budget, "slo": _slo}[proposal["trait"].name](proposal["value"])

    def summary(self) -> str:
        say = self.strings
        results = [
            say["result"].format(
                budget=_name(trace, say), worst=f"{trace['worst'] / 10:,.1f}", ttft=f"{trace['ttft'] / 1e4:.2f}"
            )
            for trace in self.data["traces"]
        ]
        return say["summary"].format(prompt=f"{PROMPT:,}", decodes=DECODES, results=say["separator"].join(results))

    def picture(self) -> str:
        say, traces = self.strings, self.data["traces"]
        names = ("budget", "steps", "worst", "ttft", "extra", "over")
        head = "".join(
            f'<th scope="col">{html.escape(say[f"column_{name}"].format(slo=f"{self.slo:,}"))}</th>' for name in names
        )
        rows = []
        for trace in traces:
            over = sum(gap > 10 * self.slo for gap in trace["gaps"])
            cells = (f"{trace['steps']:,}", f"{trace['worst'] / 10:,.1f}", f"{trace['ttft'] / 1e4:.2f}")
            cells += (f"{trace['extra'] * self.data['kv'] / 1e9:,.0f}", f"{over:,}")
            cells = "".join(f"<td>{cell}</td>" for cell in cells)
            rows.append(f'<tr><th scope="row">{html.escape(_name(trace, say))}</th>{cells}</tr>')
        caption = html.escape(say["picture"].format(worst=f"{traces[0]['worst'] / 10:,.0f}"))
        numbers = {"decodes": DECODES, "context": f"{CONTEXT:,}", "prompt": f"{PROMPT:,}", "model": MODEL}
        numbers |= {"hardware": GPU, "mfu": f"{self.data['mfu']:.0%}", "mbu": f"{self.data['mbu']:.0%}"}
        setting = html.escape(say["setting"].format(**numbers))
        return "\n".join(
            [
                '<div class="cbp cbp-stall cbp-picture">',
                f"<p>{setting}</p>",
                _svg(traces, say, caption),
                f"<p>{caption}</p>",
                f"<table><thead><tr>{head}</tr></thead><tbody>",
                *rows,
                "</tbody></table>",
                "</div>",
            ]
        )


def trace(budget: int | None) -> dict:
    """What happens under one budget, on the simulator. Times since the arrival, and gaps, in 0.1 ms.

    times, gaps   moments at which every decode says a token, and how long after the one before it. All decodes say
                  theirs together
    chunks        [begin, end, tokens] of each step that computes a part of the prompt
    ttft, worst   of the newcomer; longest gap of a decode
    extra         tokens whose keys and values are read again, since the prompt was cut
    alone         a decode step just before the prompt comes
    """
    policy, options = ("prefill_first", {}) if budget is None else ("sarathi", {"max_num_batched_tokens": budget})
    engine = Engine.simulated(policy, DECODES + 2, model=MODEL, hardware=GPU, **options)
    params = SamplingParams(max_tokens=CONTEXT, ignore_eos=True)
    decodes = [engine.add_request(range(i << 20, (i << 20) + CONTEXT), params) for i in range(DECODES)]
    while not all(r.status is Status.DECODE for r in decodes):
        engine.step()
    for _ in range(BEFORE + 1):
        engine.step()
    arrival, first = engine.executor.now(), engine.num_steps
    newcomer = engine.add_request(range(1 << 30, (1 << 30) + PROMPT), params)
    while not newcomer.output:
        engine.step()
    prefill = engine.steps[first:]
    for _ in range(AFTER):
        engine.step()

    said = [r.token_times[-_tokens_since(r, engine.steps[first - BEFORE - 1].begin) :] for r in decodes]
    assert all(times == said[0] for times in said), "the decodes say their tokens together"
    gaps = [_tenths(b - a) for a, b in pairwise(said[0])]
    chunks = []
    for step in prefill:
        tokens = sum(s.stop - s.start for s in step.shares if s.request_id == newcomer.id)
        chunks.append([_tenths(step.begin - arrival), _tenths(step.end - arrival), tokens])
    stops = [share.stop for step in prefill for share in step.shares if share.request_id == newcomer.id]
    return {
        "budget": budget,
        "times": [_tenths(time - arrival) for time in said[0][1:]],
        "gaps": gaps,
        "chunks": chunks,
        "steps": len(stops),
        "ttft": _tenths(newcomer.token_times[0] - arrival),
        "worst": max(gaps),
        "extra": sum(stops) - PROMPT,
        "alone": _tenths(engine.steps[first - 1].end - engine.steps[first - 1].begin),
    }


def _tokens_since(request, begin: float) -> int:
    return sum(time >= begin - 1e-9 for time in request.token_times)


def _tenths(seconds: float) -> int:
    return round(seconds * 1e4)


@cache
def _traces() -> tuple[dict, ...]:
    return tuple(trace(budget) for budget in BUDGETS)


def _data(slo: int) -> dict:
    model, gpu = MODELS[MODEL], HARDWARE[GPU]
    return {
        "model": MODEL, "hardware": GPU, "mfu": gpu.mfu, "mbu": gpu.mbu, "kv": model.kv_bytes_per_token,
        "decodes": DECODES, "context": CONTEXT, "prompt": PROMPT, "traces": [dict(one) for one in _traces()],
        "slos": sorted({*_SLO_STOPS, slo}),
    }  # fmt: skip


def _budget(value):
    if value is not None and (isinstance(value, bool) or value not in BUDGETS):
        known = ", ".join(map(str, BUDGETS))
        raise ValueError(f"budget must be one of {known}, got {value!r}")
    return value if value is None else int(value)


def _slo(value) -> int:
    return integer("slo", value, *SLO, unit=" (ms)")


def _name(trace: dict, say: dict) -> str:
    return say["none"] if trace["budget"] is None else f"{trace['budget']:,}"


def _svg(traces: list[dict], say: dict, text: str) -> str:
    """A lane for each budget, 360 wide: a mark for each token of one decode, and where the newcomer's first one is."""
    left, right, lane = 44, 352, 20
    low = min(trace["times"][0] for trace in traces)
    high = max(trace["times"][-1] for trace in traces)
    bottom = 6 + lane * len(traces)

    def x(time: float) -> str:
        return f"{left + (time - low) / (high - low) * (right - left):.1f}"

    lines = [f'<svg viewBox="0 0 360 {bottom + 36}" role="img" aria-label="{text}">']
    for second in range(0, high // 10_000 + 1):
        at = x(second * 10_000)
        lines.append(f'<path class="cbp-gridline" d="M{at} 4V{bottom}"/>')
        lines.append(f'<text class="cbp-muted" text-anchor="middle" x="{at}" y="{bottom + 14}">{second}</text>')
    for number, trace in enumerate(traces):
        top = 6 + lane * number
        marks = "".join(f"M{x(time)} {top + 3}v{lane - 6}" for time in trace["times"])
        name = html.escape(_name(trace, say))
        lines.append(f'<text class="cbp-muted" text-anchor="end" x="{left - 5}" y="{top + 14}">{name}</text>')
        lines.append(f'<path class="cbp-tokens" d="{marks}"/>')
    axis = html.escape(say["axis_time"])
    lines.append(f'<text class="cbp-muted" text-anchor="end" x="{right}" y="{bottom + 30}">{axis}</text>')
    return "\n".join([*lines, "</svg>"])
