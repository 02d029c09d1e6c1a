"""What is measured, under the field's names.

TTFT  time to first token: from a request's arrival to its first output token
TBT   time between tokens: from one output token of a request to the next (also called ITL, inter-token latency)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cbref.request import Chunk, Request
from cbref.schedulers import Scheduler


@dataclass(frozen=True, slots=True)
class Share:
    """What one request got in one step: tokens ``start:stop`` in lane ``slot``."""

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
            Share(c.request.id, c.request.slot, c.start, c.stop, c.start < len(c.request.prompt)) for c in chunks
        )
        running, pool = scheduler.running, scheduler.pool
        live = sum(r.num_computed for r in running) + sum(map(len, chunks))
        return cls(
            index, begin, end, shares, len(running), len(scheduler.waiting), pool.num_used * pool.block_size, live
        )


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, in seconds of the engine's clock."""

    arrival: float
    admitted: float | None
    token_times: Sequence[float]
    finished: float

    @classmethod
    def of(cls, request: Request) -> RequestMetrics:
        return cls(request.arrival, request.admitted, request.token_times, request.finished)

    @property
    def queueing_delay(self) -> float | None:
        return None if self.admitted is None else self.admitted - self.arrival

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tbt(self) -> np.ndarray:
        return np.diff(np.asarray(self.token_times))

    @property
    def e2e(self) -> float:
        return self.finished - self.arrival


def percentiles(values: Iterable[float], points: Sequence[float] = (50, 99)) -> dict[str, float | None]:
    values = np.fromiter(values, float)
    return {f"p{p:g}": float(np.percentile(values, p)) if values.size else None for p in points}


def summarize(metrics: Iterable[RequestMetrics], steps: Sequence[StepRecord], max_num_seqs: int) -> dict:
    """The figures that compare two policies, as a dict fit for JSON. Seconds, tokens, steps, shares of one.

    A slot-iteration is one slot in one step. It is useful when the request in the slot is computed for, wasted when the
    slot is empty or held by a request that is done; occupancy is the useful share.
    """
    metrics = list(metrics)
    useful = sum(len(step.shares) for step in steps)
    slots = len(steps) * max_num_seqs
    tokens = sum(len(m.token_times) for m in metrics)
    seconds = sum(step.end - step.begin for step in steps)
    reserved = sum(step.kv_reserved for step in steps)
    return {
        "requests": len(metrics),
        "steps": len(steps),
        "output_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        "slot_iterations": slots,
        "wasted_slot_iterations": slots - useful,
        "occupancy": useful / slots if slots else None,
        "kv_utilisation": sum(step.kv_live for step in steps) / reserved if reserved else None,
        "ttft": percentiles(m.ttft for m in metrics if m.token_times),
        "tbt": percentiles(t for m in metrics for t in m.tbt),
        "e2e": percentiles(m.e2e for m in metrics),
    }
