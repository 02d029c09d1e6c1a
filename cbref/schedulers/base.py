"""The part that every policy shares: a waiting queue, a running batch, and the decisions of one step.

    make_room  who must give up memory?   running -> waiting (preemption; none where memory is reserved)
    admit      who may come in?           waiting -> running
    compose    what is computed now?      running -> chunks of this step
    retire     who leaves?                running -> out, blocks freed

What can differ is orthogonal: the order of the queue, the rule of admission, the limits of a step, and three switches
(``hold_batch``, ``mixed``, ``chunked``). A policy is a choice among these; where it needs more it overrides one method.
A scheduler never looks at a clock and never at a tensor: one object drives a real model, a simulator and a picture.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from cbref.kv_cache import BlockPool
from cbref.request import Chunk, Request, Status
from cbref.speculation import NgramDrafter, can_speculate

# The queue's order, as what is sorted by; who came first goes first among equals.
ORDERS: dict[str, Callable[[Scheduler, Request], float] | None] = {
    "fcfs": None,  # first come, first served
    "sjf": lambda scheduler, r: len(r.prompt) + r.params.max_tokens,  # shortest job first
    "priority": lambda scheduler, r: r.priority,  # lower numbers first
    "lpm": lambda scheduler, r: -len(scheduler.prefix_of(r)),  # longest prefix match
}
# reserve: room for the longest possible output, so that nobody is ever preempted (Orca, TensorRT-LLM's no-evict).
# optimistic: room for what is there; whoever outgrows the pool preempts the last in line, which is recomputed (vLLM).
ADMISSIONS = ("reserve", "optimistic")


class Scheduler:
    """First come, first served, at iteration level, whole prompts.

    max_num_seqs            most requests in the batch at once (the source document's ``max_batch_size``)
    max_num_batched_tokens  most tokens in a step; None: no limit
    chunk_size              most tokens of one prompt in a step; None: no limit
    order                   of the queue: one of ``ORDERS``
    admission               one of ``ADMISSIONS``
    prefix_caching          find full blocks again by content
    drafter                 guesses tokens that ride along with decodes, such as ``cbref.speculation.NgramDrafter()``
    """

    hold_batch = False  # True: nobody joins a batch that has begun, nobody leaves before all are done
    mixed = True  # False: a step is all prefill or all decode, and prefill has the right of way
    chunked = False  # True: a prompt may be cut where the budget ends

    def __init__(
        self,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int | None = None,
        chunk_size: int | None = None,
        order: str = "fcfs",
        admission: str = "reserve",
        prefix_caching: bool = False,
        drafter: NgramDrafter | None = None,
    ):
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        for name, value in {**limits, "chunk_size": chunk_size}.items():
            given = value is not None or name == "max_num_seqs"
            if given and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        if max_num_batched_tokens is not None and max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, below max_num_seqs, {max_num_seqs}: "
                "a step could not give every running request its one token"
            )
        if chunk_size is not None and not self.chunked:
            raise ValueError(f"chunk_size is {chunk_size}, but this policy does not cut prompts; leave it out")
        if self.hold_batch and admission != "reserve":
            raise ValueError(f"admission is {admission!r}, but a batch that is held together keeps its memory: reserve")
        for name, value, choices in (("order", order, ORDERS), ("admission", admission, ADMISSIONS)):
            if value not in choices:
                raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(choices)}")
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = math.inf if max_num_batched_tokens is None else max_num_batched_tokens
        self.chunk_size = math.inf if chunk_size is None else chunk_size
        self.order, self.admission, self.prefix_caching = order, admission, prefix_caching
        self.drafter = drafter
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission
        self.num_preemptions = 0
        self.pool: BlockPool | None = None  # the engine's; set by bind

    def bind(self, pool: BlockPool) -> None:
        """Called once by the engine that takes this scheduler into service."""
        if self.pool is not None:
            raise ValueError("this scheduler already serves an engine; make a new one for each engine")
        self.pool = pool

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def check(self, prompt_len: int, max_tokens: int) -> None:
        """Refuse, with a ``ValueError``, what no step could ever take."""
        whole = prompt_len if self.admission == "reserve" else prompt_len + max_tokens - 1  # after a preemption
        if not self.chunked and whole > self.max_num_batched_tokens:
            raise ValueError(
                f"{whole} tokens may have to be computed in one step, over max_num_batched_tokens, "
                f"{self.max_num_batched_tokens}; raise it, or choose a policy that cuts prompts"
            )

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self, now: float) -> list[Chunk]:
        """One step's plan. Every chunk's tokens have a place in the pool when this returns."""
        if not self.make_room(now):  # who was pushed out a moment ago must not come straight back in
            self.admit(now)
        return self.compose()

    # ------------------------------------------------------------------ memory

    def make_room(self, now: float) -> bool:
        """Give every running request blocks for all its tokens, preempting from the end of the line. True if it did."""
        before = self.num_preemptions
        for request in list(self.running) if self.admission == "optimistic" else ():
            while request.slot is not None and request.num_tokens > self.pool.room(request.id):
                if self.pool.fits(request.id, request.num_tokens):
                    self.pool.grow(request.id, request.num_tokens)
                else:
                    self.preempt(self.victim(), now)
        return self.num_preemptions > before

    def victim(self) -> Request:
        """Who gives way: the one admitted last; with priorities, the last of the least urgent."""
        if self.order == "priority":
            return max(reversed(self.running), key=lambda r: (r.priority, r.arrival))
        return self.running[-1]

    def preempt(self, request: Request, now: float) -> None:
        """Back to the head of the queue, without blocks. Its tokens stay, and are computed again as one long prompt."""
        self.running = [r for r in self.running if r is not request]
        self.pool.release(request.id)
        request.move(Status.WAITING, now)
        request.slot, request.num_computed = None, 0
        request.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def prefix_of(self, request: Request) -> list[int]:
        """Blocks of the cache that the request can begin with."""
        return self.pool.find_prefix(request.tokens()) if self.prefix_caching else []

    # ------------------------------------------------------------------ who comes, what is done, who goes

    def admit(self, now: float) -> None:
        """Take requests from the head of the queue while they may come in. The head lets nobody pass."""
        if self.hold_batch and self.running:
            return
        budget = self.admission_budget()
        key = ORDERS[self.order]
        if key and budget > 0 and len(self.running) < self.max_num_seqs:
            self.waiting = deque(sorted(self.waiting, key=lambda r: key(self, r)))
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            prefix = self.prefix_of(request)
            room = request.max_len if self.admission == "reserve" else request.num_tokens
            if not self.pool.fits(request.id, room, prefix):
                break
            self.waiting.popleft()
            self.pool.share(request.id, prefix)
            self.pool.grow(request.id, room)
            request.num_computed = request.num_cached = len(prefix) * self.pool.block_size
            request.move(Status.PREFILL, now)
            request.slot = min(set(range(self.max_num_seqs)) - {r.slot for r in self.running})
            self.running.append(request)
            budget -= min(request.missing, self.chunk_size)

    def admission_budget(self) -> float:
        """Tokens that newcomers may bring into this step: what those who run beside them will leave of it."""
        beside = (r for r in self.running if not r.done and (self.mixed or r.status is Status.PREFILL))
        return self.max_num_batched_tokens - sum(min(r.missing, self.chunk_size) for r in beside)

    def compose(self) -> list[Chunk]:
        """Go down the line and give each request what it lacks, while the budget lasts."""
        chunks, budget = [], self.max_num_batched_tokens
        for request in self.line_up():
            missing = request.missing
            length = min(missing, budget, self.chunk_size) if missing > 1 else min(missing, budget)
            if length <= 0 or (length < missing and not self.chunked):  # a whole prompt or nothing
                break
            chunks.append(Chunk(request, request.num_computed, request.num_computed + int(length)))
            budget -= length
        return self.speculate(chunks, budget) if self.drafter else chunks

    def speculate(self, chunks: list[Chunk], budget: float) -> list[Chunk]:
        """Spend what is left of the budget on guesses for decodes, as far as their blocks reach.

        A guess takes no block: one that proves wrong would have cost a neighbour its memory, or a prefix its content.
        """
        for i, chunk in enumerate(chunks):
            request = chunk.request
            if request.status is Status.DECODE and len(chunk) == 1 and can_speculate(request):
                room = min(self.pool.room(request.id), request.max_len) - chunk.stop
                draft = self.drafter.propose(request, int(min(budget, room)))
                chunks[i] = replace(chunk, draft=draft)
                budget -= len(draft)
        return chunks

    def line_up(self) -> list[Request]:
        """Running requests that take part in this step, the first to be served first: decodes, then prompts."""
        prefills = [r for r in self.running if r.status is Status.PREFILL and not r.done]  # done: it broke
        if prefills and not self.mixed:
            return prefills
        return [r for r in self.running if r.status is Status.DECODE and not r.done] + prefills

    def computed(self, request: Request) -> None:
        """Called when a chunk of the request has been computed and ``num_computed`` says so."""
        if self.prefix_caching:
            self.pool.publish(request)

    def retire(self, now: float) -> list[Request]:
        """Let the requests go that are done, and take back their blocks. Returns them."""
        done = [r for r in self.running if r.done]
        if self.hold_batch and len(done) < len(self.running):
            return []
        return [self.remove(r, now) for r in done]

    def remove(self, request: Request, now: float) -> Request:
        """Take a request out, wherever it stands, and free what it holds."""
        if request.slot is not None:
            self.running = [r for r in self.running if r is not request]
        else:
            self.waiting = deque(r for r in self.waiting if r is not request)
        self.pool.release(request.id)
        request.move(Status.FINISHED, now)
        return request
