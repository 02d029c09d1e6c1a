"""The interactive "static vs. continuous batching": the same requests under both rules, on one clock."""

import html
from collections.abc import Sequence

import traitlets

from cbref import strings as texts
from cbref.engine import Engine
from cbref.widgets.static import StaticTwin, integer, source
from cbref.workloads import of_lengths

MAX_REQUESTS, MAX_LENGTH, SLOTS = 8, 20, (2, 4)


class BatchingWidget(StaticTwin):
    """Slots as lanes, steps along x: step through both schedules, change the requests, watch the wasted slots.

    Args:
        lengths: tokens that each request generates, in order of arrival; all arrive before the first step.
        slots: how many requests run at once.
        step: where the clock stands at first.
        language: of the texts; see `cbref.strings.load`.

    Raises:
        ValueError: a value is out of range; the message names it and the limit.
    """

    kind = "batching"
    _esm = source("dom.js", "batching.js")
    _css = source("theme.css", "batching.css")

    lengths = traitlets.List(traitlets.Int()).tag(sync=True)
    slots = traitlets.Int().tag(sync=True)
    step = traitlets.Int().tag(sync=True)
    strings = traitlets.Dict().tag(sync=True)

    def __init__(
        self, lengths: Sequence[int] = (4, 2, 6, 3, 5, 2), slots: int = 3, step: int = 0, language: str | None = None
    ):
        super().__init__(
            lengths=_lengths(lengths),
            slots=integer("slots", slots, *SLOTS),
            step=_step(step),
            strings=texts.load("batching", language),
        )

    @traitlets.validate("lengths", "slots", "step")
    def _check(self, proposal):
        name, value = proposal["trait"].name, proposal["value"]
        if name == "lengths":
            return _lengths(value)
        return integer("slots", value, *SLOTS) if name == "slots" else _step(value)

    def summary(self) -> str:
        sides = _schedule(self.lengths, self.slots)
        steps = {name: side["steps"] for name, side in sides.items()}
        return self.strings["summary"].format(slots=self.slots, **steps)

    def picture(self) -> str:
        sides = _schedule(self.lengths, self.slots)
        columns = max(side["steps"] for side in sides.values())
        tables = [self._table(name, side, columns) for name, side in sides.items()]
        note = f"<p>{html.escape(self.strings['fallback_note'])}</p>"
        return "\n".join(['<div class="cbb cbb-picture">', *tables, note, "</div>"])

    def _table(self, name: str, side: dict, columns: int) -> str:
        say = {key: html.escape(text) for key, text in self.strings.items()}
        area = self.slots * side["steps"]
        caption = say["caption"].format(
            side=say[name], slots=self.slots, steps=side["steps"], wasted=side["wasted"], area=area
        )
        lanes = [[None] * side["steps"] for _ in range(self.slots)]
        for span in side["spans"]:
            lanes[span["slot"]][span["start"] : span["stop"]] = [span["request"]] * (span["stop"] - span["start"])
        rest = f'<td colspan="{columns - side["steps"]}"></td>' if side["steps"] < columns else ""  # one clock for both
        rows = []
        for slot, lane in enumerate(lanes, start=1):
            cells = [_cell(request, say["wasted_mark"]) for request in lane]
            rows.append(f'<tr><th scope="row">{say["slot"].format(slot=slot)}</th>{"".join(cells)}{rest}</tr>')
        return "\n".join([f'<table style="--steps: {columns}">', f"<caption>{caption}</caption>", *rows, "</table>"])


def _cell(request: int | None, wasted: str) -> str:
    if request is None:
        return f'<td class="cbb-wasted">{wasted}</td>'
    return f'<td class="cbb-token" data-request="{request}">{chr(ord("A") + request)}</td>'


def _lengths(values) -> list[int]:
    values = list(values)
    if not 1 <= len(values) <= MAX_REQUESTS:
        raise ValueError(f"lengths must hold 1 to {MAX_REQUESTS} requests, got {len(values)}: {values!r}")
    return [integer(f"lengths[{i}]", value, 1, MAX_LENGTH) for i, value in enumerate(values)]


def _step(value) -> int:
    return integer("step", value, 0, MAX_REQUESTS * MAX_LENGTH)


def _schedule(lengths: Sequence[int], slots: int) -> dict[str, dict]:
    """What the engine's own schedulers do: {"static": {spans, steps, useful, wasted}, "continuous": {...}}."""
    work = of_lengths(lengths)
    sides = {}
    for name, policy in (("static", "static"), ("continuous", "orca")):
        engine = Engine.simulated(policy, slots)
        completions = engine.generate(work.prompts, work.params, progress=False)
        shares = [(step.index, share) for step in engine.steps for share in step.shares]
        spans = []
        for number, completion in enumerate(completions):
            mine = [(at, share.slot) for at, share in shares if share.request_id == completion.request_id]
            spans.append({"request": number, "slot": mine[0][1], "start": mine[0][0], "stop": mine[-1][0] + 1})
        useful = sum(lengths)
        wasted = slots * engine.num_steps - useful
        sides[name] = {"spans": spans, "steps": engine.num_steps, "useful": useful, "wasted": wasted}
    return sides
