"""Request-level batching (FasterTransformer, ``transformers.generate``): the batch comes and goes as one."""

from __future__ import annotations

from cbref.request import Request
from cbref.schedulers.base import Scheduler


class StaticScheduler(Scheduler):
    """Two rules set it apart: nobody joins a batch that has begun, nobody leaves before all are done.

    Requests that are done wait in their slots, blocks held, for the longest one: the convoy effect. This engine spends
    no computation on them; a padded batch would, so what it measures for static batching is the kind case.
    """

    def admit(self, now: float) -> None:
        if not self.running:
            super().admit(now)

    def retire(self, now: float) -> list[Request]:
        return super().retire(now) if all(r.done for r in self.running) else []
