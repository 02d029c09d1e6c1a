"""Scheduling policies by name. Each is a small diff on ``base.Scheduler``."""

from __future__ import annotations

import inspect

from cbref.schedulers.base import ADMISSIONS, ORDERS, Scheduler
from cbref.schedulers.chunked import Sarathi2023Scheduler, SarathiScheduler
from cbref.schedulers.orca import OrcaScheduler
from cbref.schedulers.prefill_first import PrefillFirstScheduler
from cbref.schedulers.sglang import SglangScheduler
from cbref.schedulers.static import StaticScheduler
from cbref.schedulers.trtllm import TrtllmScheduler

POLICIES: dict[str, type[Scheduler]] = {
    "static": StaticScheduler,
    "orca": OrcaScheduler,
    "prefill_first": PrefillFirstScheduler,
    "sarathi_2023": Sarathi2023Scheduler,
    "sarathi": SarathiScheduler,
    "vllm_v1": SarathiScheduler,
    "trtllm": TrtllmScheduler,
    "sglang": SglangScheduler,
}


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
        raise ValueError(f"unknown policy {policy!r}; choose one of {', '.join(POLICIES)}, or pass a Scheduler")
    known = options_of(POLICIES[policy])
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"policy {policy!r} has no option {', '.join(unknown)}; it has {', '.join(known)}")
    return POLICIES[policy](**options)


def options_of(policy: type[Scheduler]) -> list[str]:
    """Names of a policy's options, its own first."""
    names: dict[str, None] = {}
    for cls in policy.__mro__[:-1]:
        if "__init__" in vars(cls):
            parameters = inspect.signature(cls.__init__).parameters.values()
            names |= {p.name: None for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD}
    return list(names)


__all__ = ["ADMISSIONS", "ORDERS", "POLICIES", "Scheduler", "make_scheduler", "options_of"]
