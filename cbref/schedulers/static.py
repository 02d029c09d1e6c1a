"""Request-level batching (FasterTransformer, ``transformers.generate``): the batch comes and goes as one."""

from cbref.schedulers.base import Scheduler


class StaticScheduler(Scheduler):
    """One switch: nobody joins a batch that has begun, nobody leaves before all are done.

    Requests that are done wait in their slots, blocks held, for the longest one: the convoy effect.
    This engine computes nothing for them. A padded batch would: what we measure is the kind case.
    """

    hold_batch = True
