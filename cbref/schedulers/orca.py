"""Iteration-level scheduling (Orca, Yu et al., OSDI 2022): join and leave at every step."""

from cbref.schedulers.base import Scheduler


class OrcaScheduler(Scheduler):
    """The base as it stands: whole prompts ride in the same pass as the decodes, KV is reserved to completion."""
