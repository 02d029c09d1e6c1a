"""The invariants of a running engine, checked from the outside."""

from __future__ import annotations

from collections.abc import Iterable

from cbref.request import Request
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
