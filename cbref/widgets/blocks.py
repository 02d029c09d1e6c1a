"""The interactive "block tables": a small pool, six requests, and who holds which block after every step."""

from __future__ import annotations

import html
from functools import cache

import traitlets

from cbref import strings as texts
from cbref.engine import Engine
from cbref.request import Request, SamplingParams, Status
from cbref.schedulers import POLICIES
from cbref.widgets.static import StaticTwin, source

BLOCK, POOLS, SLOTS = 4, (10, 12, 16), 6
SYSTEM = tuple(range(1, 9))  # the system prompt that some requests share: two full blocks
# Whether it begins with the system prompt, tokens of its own, tokens it generates, steps that go by before it arrives.
REQUESTS = ((True, 3, 9, 0), (True, 2, 11, 1), (False, 6, 12, 2), (True, 4, 8, 4), (False, 10, 6, 9), (True, 1, 6, 14))


class Blocks(StaticTwin):
    """A pool of blocks and the requests' tables, step by step: prefix hits, growth, preemption, blocks left idle.

    Args:
        num_blocks: blocks of 4 tokens in the pool at first; the reader can change it. One of 10, 12, 16.
        prefix_caching: whether full blocks are found again by content at first; the reader can change it.
        step: where the clock stands at first.
        language: of the texts; see `cbref.strings.load`.

    Raises:
        ValueError: a value is out of range; the message names it and the limit.
    """

    kind = "blocks"
    _esm = source("dom.js", "parts.js", "blocks.js")
    _css = source("theme.css", "parts.css", "blocks.css")

    num_blocks = traitlets.Int().tag(sync=True)
    prefix_caching = traitlets.Bool().tag(sync=True)
    step = traitlets.Int().tag(sync=True)
    requests = traitlets.List().tag(sync=True)
    traces = traitlets.Dict().tag(sync=True)
    strings = traitlets.Dict().tag(sync=True)

    def __init__(self, num_blocks: int = 12, prefix_caching: bool = True, step: int = 0, language: str | None = None):
        words = texts.load("blocks", language)
        choices = [(blocks, caching) for blocks in POOLS for caching in (True, False)]
        super().__init__(
            num_blocks=_num_blocks(num_blocks),
            prefix_caching=_flag(prefix_caching),
            step=_step(step),
            requests=[
                {"prompt": shared * len(SYSTEM) + own, "output": output, "arrival": arrival}
                for shared, own, output, arrival in REQUESTS
            ],
            traces={_key(*choice): [_told(frame, words) for frame in _trace(*choice)] for choice in choices},
            strings=words,
        )

    @traitlets.validate("num_blocks", "prefix_caching", "step")
    def _check(self, proposal):
        return {"num_blocks": _num_blocks, "prefix_caching": _flag, "step": _step}[proposal["trait"].name](
            proposal["value"]
        )

    def summary(self) -> str:
        frames = self.traces[_key(self.num_blocks, self.prefix_caching)]
        last = dict(zip(COUNTS, frames[-1]["counts"], strict=True))
        caching = self.strings["caching_on" if self.prefix_caching else "caching_off"]
        sizes = {"blocks": self.num_blocks, "size": BLOCK, "steps": len(frames) - 1}
        return self.strings["summary"].format(caching=caching, **sizes, **last)

    def picture(self) -> str:
        say = {key: html.escape(text) for key, text in self.strings.items()}
        frames = self.traces[_key(self.num_blocks, self.prefix_caching)]
        heads = "".join(f'<th scope="col">{block}</th>' for block in range(self.num_blocks))
        rows = []
        for step, frame in enumerate(frames[1:], start=1):
            cells = "".join(_cell(frame, block, say) for block in range(self.num_blocks))
            rows.append(f'<tr><th scope="row">{step}</th>{cells}</tr>')
        story = "\n".join(f"<li>{html.escape(' '.join(frame['say']))}</li>" for frame in frames[1:])
        return "\n".join(
            [
                f'<div class="cbp cbk cbk-picture" lang="{say["lang"]}" style="--columns: {self.num_blocks}">',
                f"<table><caption>{html.escape(self.summary())}</caption>",
                f'<thead><tr><th scope="col">{say["column_step"]}</th>{heads}</tr></thead><tbody>',
                *rows,
                f'</tbody></table>\n<p class="cbp-muted">{say["picture_note"]}</p>',
                f"<details><summary>{say['column_event']}</summary><ol>\n{story}\n</ol></details>\n</div>",
            ]
        )


def _cell(frame: dict, block: int, say: dict) -> str:
    holders = [number for number, request in enumerate(frame["requests"]) if block in request[3]]
    if not holders:
        mark = say["idle_mark"] if block in frame["idle"] else say["free_mark"]
        return f"<td>{mark}</td>"
    names = "".join(_name(number) for number in holders)
    hue = f' data-request="{holders[0]}"' if len(holders) == 1 else ""
    many = " cbk-many" if len(holders) > 2 else ""
    return f'<td class="cbk-held{many}"{hue}>{names}</td>'


# ------------------------------------------------------------------ the run, recorded

STATES = {Status.WAITING: "waiting", Status.PREFILL: "running", Status.DECODE: "running", Status.FINISHED: "finished"}
COUNTS = ("computed", "again", "hits", "preemptions")  # sums since the start; the first three in tokens


class _Watched(POLICIES["orca"]):
    """The scheduler of the run. Tables are looked at twice in a step: when it is planned, and before anyone leaves."""

    def schedule(self, now):
        plan = super().schedule(now)
        self.seen = {"idle": set(self.pool.idle), "known": self.pool.published}
        head = self.waiting[0] if self.waiting else None
        self.held_up = None
        if head is not None:
            prefix = self.prefix_of(head)
            missing = self.pool.blocks_for(head.num_tokens) - len(prefix)
            free = self.pool.num_free - sum(block in self.pool.idle for block in prefix)
            self.held_up = {"name": head.id, "need": missing, "free": free}
        return plan

    def retire(self, now):
        self.tables = {r.id: (list(self.pool.table(r.id)), r.num_computed) for r in self.running}
        return super().retire(now)


@cache
def _trace(num_blocks: int, caching: bool) -> list[dict]:
    """One frame before the first step and one after each: requests as [state, stored, made, table], and events."""
    scheduler = _Watched(SLOTS, admission="optimistic", prefix_caching=caching)
    engine = Engine.simulated(scheduler, num_blocks=num_blocks, block_size=BLOCK)
    requests = []
    for number, (shared, own, output, arrival) in enumerate(REQUESTS):
        prompt = [*SYSTEM * shared, *range(100 * (number + 1), 100 * (number + 1) + own)]
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        requests.append(engine.add_request(prompt, params, request_id=_name(number), arrival=float(arrival)))
    counts = dict.fromkeys(COUNTS, 0)
    furthest = dict.fromkeys((r.id for r in requests), 0)
    frames = [_frame(engine, requests, [("start", {})], counts)]
    while engine.has_work:
        before = {r.id: (r.status, r.num_computed, r.preemptions, list(engine.pool.table(r.id))) for r in requests}
        idle, known = set(engine.pool.idle), engine.pool.published
        engine.step()
        shares = engine.steps[-1].shares
        counts["computed"] += sum(s.stop - s.start for s in shares)
        for share in shares:
            counts["again"] += max(0, min(share.stop, furthest[share.request_id]) - share.start)
            furthest[share.request_id] = max(furthest[share.request_id], share.stop)
        events = _events(scheduler, requests, before, idle, known, shares)
        counts["hits"] += sum(values["hit"] for kind, values in events if kind in ("admit", "back"))
        counts["preemptions"] = scheduler.num_preemptions
        frames.append(_frame(engine, requests, events, counts))
    return frames


def _frame(engine: Engine, requests: list[Request], events: list, counts: dict) -> dict:
    now, pool = engine.executor.now(), engine.pool
    rows = []
    for r in requests:
        state = "future" if r.status is Status.WAITING and r.arrival > max(now - 1, 0) else STATES[r.status]
        rows.append([state, r.num_computed, len(r.output), list(pool.table(r.id))])
    known = sorted(pool.published)
    return {
        "requests": rows, "idle": sorted(pool.idle), "known": known, "events": events, "counts": [*counts.values()]
    }  # fmt: skip


def _events(scheduler, requests, before, idle, known, shares) -> list[tuple[str, dict]]:
    """What happened in the step, in its order: memory, newcomers, tokens, leavers, and whoever is still kept out."""
    events, computed = [], {s.request_id: s for s in shares}
    for r in requests:
        _, stored, preemptions, table = before[r.id]
        if r.preemptions > preemptions:
            events.append(("preempt", {"name": r.id, "tokens": stored, "blocks": table}))
    forgotten = [b for b, node in known.items() if scheduler.seen["known"].get(b) != node]
    if forgotten:
        events.append(("evict", {"blocks": sorted(forgotten)}))
    grown, decodes = [], []
    for r in requests:
        share, old = computed.get(r.id), before[r.id]
        if share is None:
            continue
        table, _ = scheduler.tables[r.id]
        if old[0] is Status.WAITING:
            hit = share.start // BLOCK
            given = {"name": r.id, "hit": share.start, "tokens": share.stop - share.start, "blocks": table[hit:]}
            given |= {"found": table[:hit], "idle": hit > 0 and set(table[:hit]) <= idle}
            events.append(("back" if r.preemptions else "admit", given))
        else:
            decodes.append(r.id)
            grown += [(r.id, block) for block in table[len(old[3]) :]]
    if decodes:
        events.append(("decode", {"names": decodes}))
    if grown:
        events.append(("grow", {"pairs": grown}))
    if scheduler.held_up:
        late = scheduler.held_up["need"] <= scheduler.held_up["free"]
        events.append(("wait_turn" if late else "wait", scheduler.held_up))
    for r in requests:
        if r.status is Status.FINISHED and before[r.id][0] is not Status.FINISHED:
            table, _ = scheduler.tables[r.id]
            left = [b for b in table if b in scheduler.pool.idle]
            held = [b for b in table if scheduler.pool.num_holders(b)]
            events.append(("finish", {"name": r.id, "blocks": table, "left": left, "held": held}))
    return events


# ------------------------------------------------------------------ the run, told


def _told(frame: dict, words: dict) -> dict:
    """The frame with its events in words."""
    say = [_sentence(kind, values, words) for kind, values in frame["events"]]
    return {key: value for key, value in frame.items() if key != "events"} | {"say": say}


def _sentence(kind: str, values: dict, words: dict) -> str:
    separator = words["list_separator"]

    def listed(name, value):
        numbers = name in ("blocks", "found", "left", "held")
        return separator.join(words["number"].format(block=one) if numbers else one for one in value)

    shown = {k: listed(k, v) if isinstance(v, list) and k != "pairs" else v for k, v in values.items()}
    if kind == "start":
        shared = [_name(number) for number, (shared, *_) in enumerate(REQUESTS) if shared]
        names = {"count": len(REQUESTS), "names": separator.join(shared), "tokens": len(SYSTEM)}
        return words["event_start"].format(**names)
    if kind == "grow":
        pairs = [words["grown"].format(name=name, block=listed("blocks", [block])) for name, block in values["pairs"]]
        return words["event_grow"].format(pairs=separator.join(pairs))
    if kind in ("admit", "back"):
        kind += "_idle" if values["idle"] else "_hit" if values["hit"] else ""
    elif kind == "finish":
        parts = [words[f"finish_{key}"].format(blocks=shown[key]) for key in ("left", "held") if values[key]]
        return " ".join([words["event_finish"].format(**shown), *parts])
    return words[f"event_{kind}"].format(**shown)


def _name(number: int) -> str:
    return chr(ord("A") + number)


def _key(num_blocks: int, caching: bool) -> str:
    return f"{num_blocks}-{int(caching)}"


def _num_blocks(value) -> int:
    if isinstance(value, bool) or value not in POOLS:
        raise ValueError(f"num_blocks must be one of {', '.join(map(str, POOLS))}, got {value!r}")
    return int(value)


def _flag(value) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"prefix_caching must be True or False, got {value!r}")
    return value


def _step(value) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100:
        raise ValueError(f"step must be an integer from 0 to 100, got {value!r}")
    return value
