"""Scheduling policies by name. Each is a small diff on ``base.Scheduler``."""

from __future__ import annotations

from cbref.schedulers.base import Scheduler
from cbref.schedulers.orca import OrcaScheduler
from cbref.schedulers.static import StaticScheduler

POLICIES: dict[str, type[Scheduler]] = {"static": StaticScheduler, "orca": OrcaScheduler}


def make_scheduler(policy: str | Scheduler, **options) -> Scheduler:
    """A scheduler from a policy's name and its options (None: the default). A ``Scheduler`` comes back as it is."""
    options = {name: value for name, value in options.items() if value is not None}
    if isinstance(policy, Scheduler):
        if options:
            raise ValueError(
                f"{', '.join(options)} given beside a {type(policy).__name__}; set it where you make the scheduler"
            )
        return policy
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; choose one of {', '.join(sorted(POLICIES))}, or pass a Scheduler")
    return POLICIES[policy](**options)


__all__ = ["POLICIES", "OrcaScheduler", "Scheduler", "StaticScheduler", "make_scheduler"]
