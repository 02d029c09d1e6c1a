"""The invariants of a running engine, and of a scheduler's plan, checked from the outside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cbref.request import Chunk, Request
from cbref.schedulers import Scheduler


def audit(scheduler: Scheduler, live: Iterable[str], pending: Iterable[Request]) -> None:
    """Raise ``AssertionError`` if a block or a request is lost, in two places, or where it should not be.

    ``live`` are the ids of all requests that are not finished, ``pending`` those that have not arrived yet.
    """
    pool, running = scheduler.pool, scheduler.running
    pool.audit()
    everyone = [r.id for r in (*running, *scheduler.waiting, *pending)]
    assert sorted(everyone) == sorted(live), "a request is lost, or in two places"
    strays = set(pool.holders()) - {r.id for r in running}
    assert not strays, f"blocks are held for requests that do not run: {strays}"
    for r in running:
        room = pool.room(r.id)
        assert r.num_computed <= min(r.num_tokens, room), f"{r!r} has room for {room} tokens"
        written = pool.table(r.id)[r.num_computed // pool.block_size :]
        assert all(pool.num_holders(b) == 1 for b in written), f"{r!r} would write into a shared block"
    slots = {r.slot for r in running}
    assert len(slots) == len(running) and slots <= set(range(scheduler.max_num_seqs)), f"slots in use: {slots}"


def check_plan(chunks: Sequence[Chunk], scheduler: Scheduler) -> None:
    """Stop a faulty scheduler before its plan does harm: a ``RuntimeError`` says what it did wrong, and the remedy."""
    total, seen, name = 0, set(), type(scheduler).__name__
    for chunk in chunks:
        request, start, stop = chunk.request, chunk.start, chunk.stop
        total += len(chunk)
        if request.id in seen:
            raise RuntimeError(f"{name} planned request {request.id!r} twice in one step; make it one chunk")
        seen.add(request.id)
        if request.slot is None or request.done:
            raise RuntimeError(
                f"{name} planned {request!r}, which is not running; admit it first, and retire it when done"
            )
        if not request.num_computed == start < stop <= request.num_tokens:
            raise RuntimeError(
                f"{name} planned tokens {start}:{stop} of {request!r}; a chunk begins where computation stands "
                f"({request.num_computed}) and ends at {request.num_tokens} at the latest"
            )
        if chunk.end > scheduler.pool.room(request.id):
            raise RuntimeError(
                f"{name} planned tokens up to {chunk.end} of {request!r}, which has blocks for "
                f"{scheduler.pool.room(request.id)}; grow its table with pool.grow first"
            )
    if total > scheduler.max_num_batched_tokens:
        limit = scheduler.max_num_batched_tokens
        raise RuntimeError(f"{name} planned {total} tokens for one step, over max_num_batched_tokens, {limit}")
    if len(chunks) > scheduler.max_num_seqs:
        raise RuntimeError(f"{name} planned {len(chunks)} requests, over max_num_seqs, {scheduler.max_num_seqs}")
