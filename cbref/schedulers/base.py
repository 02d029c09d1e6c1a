"""The part that every policy shares: a waiting queue, a running batch, and three decisions.

    admit    who may come in?          waiting -> running
    compose  what is computed now?     running -> chunks of this step
    retire   who leaves?               running -> out, blocks freed

A policy overrides the decision in which it differs and nothing else. A scheduler never looks at a clock and never at a
tensor: the same object drives a real model, a simulator and a picture.
"""

from __future__ import annotations

from collections import deque

from cbref.kv_cache import BlockPool
from cbref.request import Chunk, Request, Status


class Scheduler:
    """First come, first served, at iteration level. Override ``can_admit``, ``compose`` or ``retire``.

    max_num_seqs  most requests in the batch at once (the source document's ``max_batch_size``)
    """

    def __init__(self, max_num_seqs: int = 8):
        if isinstance(max_num_seqs, bool) or not isinstance(max_num_seqs, int) or max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs!r}; it must be an integer of at least 1")
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.pool: BlockPool | None = None  # the engine's; set by bind

    def bind(self, pool: BlockPool) -> None:
        """Called once by the engine that takes this scheduler into service."""
        if self.pool is not None:
            raise ValueError("this scheduler already serves an engine; make a new one for each engine")
        self.pool = pool

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self, now: float) -> list[Chunk]:
        """One step's plan. Every chunk's tokens have a place in the pool when this returns."""
        self.admit(now)
        return self.compose()

    def admit(self, now: float) -> None:
        """Take requests from the head of the queue while they may come in. The head never lets others pass (FCFS)."""
        while self.waiting and self.can_admit(self.waiting[0]):
            request = self.waiting.popleft()
            self.pool.grow(request.id, request.max_len)
            request.move(Status.PREFILL, now)
            request.slot = min(set(range(self.max_num_seqs)) - {r.slot for r in self.running})
            self.running.append(request)

    def can_admit(self, request: Request) -> bool:
        """A slot is free, and so is KV memory up to the request's last token.

        Reserving to completion is Orca's rule (OSDI 2022, §4.2): an admitted request can always run to its end.
        """
        return len(self.running) < self.max_num_seqs and self.pool.fits(request.id, request.max_len)

    def compose(self) -> list[Chunk]:
        """All that is missing of every running request: a whole prompt, or the one token sampled last."""
        return [Chunk(r, r.num_computed, r.num_tokens) for r in self.running if not r.done]

    def retire(self, now: float) -> list[Request]:
        """Let the requests go that are done, and take back their blocks. Returns them."""
        return [self.remove(r, now) for r in self.running if r.done]

    def remove(self, request: Request, now: float) -> Request:
        """Take a request out, wherever it stands, and free what it holds."""
        if request in self.running:
            self.running = [r for r in self.running if r is not request]
        else:
            self.waiting = deque(r for r in self.waiting if r is not request)
        self.pool.release(request.id)
        request.move(Status.FINISHED, now)
        return request
