"""What is measured, under the field's names.

TTFT  time to first token: from a request's arrival to its first output token
TBT   time between tokens: from one output token of a request to the next; ITL, inter-token latency, is the same
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cbref.request import Chunk, Request, Status
from cbref.schedulers import Scheduler


@dataclass(frozen=True, slots=True)
class Share:
    """What one request got in one step: tokens ``start:stop`` in lane ``slot``.

    ``prefill``: the request is still on its way to its first token, or to its next one after a preemption.
    """

    request_id: str
    slot: int
    start: int
    stop: int
    prefill: bool


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the engine, as it was run. Times in seconds of the engine's clock, memory in tokens."""

    index: int
    begin: float
    end: float
    shares: tuple[Share, ...]
    held_slots: int  # slots that a request occupies, computed for or not
    waiting: int
    kv_reserved: int  # tokens' worth of blocks in tables
    kv_live: int  # tokens whose keys and values are stored

    @property
    def num_tokens(self) -> int:
        return sum(s.stop - s.start for s in self.shares)

    @classmethod
    def of(cls, index: int, begin: float, end: float, chunks: Sequence[Chunk], scheduler: Scheduler) -> StepRecord:
        """Taken after the chunks were computed and before the requests take notice of it."""
        shares = tuple(
            Share(c.request.id, c.request.slot, c.start, c.end, c.request.status is Status.PREFILL) for c in chunks
        )
        reserved, live = kv_tokens(chunks, scheduler)
        return cls(index, begin, end, shares, len(scheduler.running), len(scheduler.waiting), reserved, live)


def kv_tokens(chunks: Sequence[Chunk], scheduler: Scheduler) -> tuple[int, int]:
    """Tokens' worth of blocks that are held, and tokens stored in them, once the chunks are computed."""
    reserved = scheduler.pool.num_used * scheduler.pool.block_size
    return reserved, sum([r.num_computed for r in scheduler.running]) + sum([c.stop - c.start for c in chunks])


@dataclass
class Totals:
    """Sums over all steps: what is kept of a run whose steps are too many to record."""

    steps: int = 0
    begin: float | None = None  # of the first step
    end: float = 0.0  # of the last
    computed_tokens: int = 0
    slot_iterations: int = 0  # useful ones: a request was computed for
    kv_reserved: int = 0
    kv_live: int = 0
    drafted: int = 0  # tokens guessed by speculation
    accepted: int = 0  # of these, kept

    def add(self, begin: float, end: float, chunks: Sequence[Chunk], scheduler: Scheduler) -> None:
        if self.begin is None:
            self.begin = begin
        self.end = end
        self.steps += 1
        self.computed_tokens += sum([len(c) for c in chunks])
        self.slot_iterations += len(chunks)
        reserved, live = kv_tokens(chunks, scheduler)
        self.kv_reserved += reserved
        self.kv_live += live

    @property
    def seconds(self) -> float:
        return 0.0 if self.begin is None else self.end - self.begin


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, in seconds of the engine's clock."""

    arrival: float
    admitted: float | None
    token_times: Sequence[float]
    finished: float
    preemptions: int = 0

    @classmethod
    def of(cls, request: Request) -> RequestMetrics:
        return cls(request.arrival, request.admitted, request.token_times, request.finished, request.preemptions)

    @property
    def queueing_delay(self) -> float | None:
        return None if self.admitted is None else self.admitted - self.arrival

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tbt(self) -> np.ndarray:
        return np.diff(np.asarray(self.token_times))

    itl = tbt  # the field has two names for it

    @property
    def e2e(self) -> float:
        return self.finished - self.arrival

    @property
    def normalized_latency(self) -> float | None:
        """End-to-end latency per output token (Orca's measure)."""
        return self.e2e / len(self.token_times) if self.token_times else None

    def meets(self, slo: SLO) -> bool:
        """TTFT within its limit, and 99 % of the request's own token gaps within theirs."""
        if not self.token_times:
            return False
        gaps = self.tbt
        return self.ttft <= slo.ttft and (not gaps.size or float(np.percentile(gaps, 99)) <= slo.tbt)


@dataclass(frozen=True)
class SLO:
    """A service level objective, in seconds."""

    ttft: float
    tbt: float


def percentiles(values: Iterable[float], points: Sequence[float] = (50, 90, 99)) -> dict[str, float | None]:
    values = values if isinstance(values, np.ndarray) else np.fromiter(values, float)
    return {f"p{p:g}": float(np.percentile(values, p)) if values.size else None for p in points}


def summarize(metrics: Iterable[RequestMetrics], totals: Totals, max_num_seqs: int, slo: SLO | None = None) -> dict:
    """The figures that compare two policies, as a dict fit for JSON. Seconds, tokens, steps, shares of one.

    A slot-iteration is one slot in one step. It is useful when the request in the slot is computed for, wasted when the
    slot is empty or held by a request that is done; occupancy is the useful share. Goodput counts requests that meet
    the SLO.
    """
    metrics = list(metrics)
    slots = totals.steps * max_num_seqs
    tokens = sum(len(m.token_times) for m in metrics)
    seconds = totals.seconds
    gaps = np.concatenate([m.tbt for m in metrics]) if metrics else np.empty(0)
    summary = {
        "requests": len(metrics),
        "steps": totals.steps,
        "output_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "requests_per_second": len(metrics) / seconds if seconds else None,
        "slot_iterations": slots,
        "wasted_slot_iterations": slots - totals.slot_iterations,
        "occupancy": totals.slot_iterations / slots if slots else None,
        "kv_utilisation": totals.kv_live / totals.kv_reserved if totals.kv_reserved else None,
        "acceptance": totals.accepted / totals.drafted if totals.drafted else None,
        "preemptions": sum(m.preemptions for m in metrics),
        "queueing_delay": percentiles(m.queueing_delay for m in metrics if m.admitted is not None),
        "ttft": percentiles(m.ttft for m in metrics if m.token_times),
        "tbt": percentiles(gaps),
        "e2e": percentiles(m.e2e for m in metrics),
        "normalized_latency": percentiles(m.normalized_latency for m in metrics if m.token_times),
    }
    if slo:
        good = sum(m.meets(slo) for m in metrics)
        summary["slo"] = {"ttft": slo.ttft, "tbt": slo.tbt, "attainment": good / len(metrics) if metrics else None}
        summary["goodput"] = good / seconds if seconds else None
    return summary
