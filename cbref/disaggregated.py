"""Prefill and decode on GPUs of their own (Splitwise, Patel et al., ISCA 2024; DistServe, Zhong et al., OSDI 2024).

    arrival -> prefill engine -> first token
                     |  the prompt's keys and values, over a link
                     v
               decode engine -> all further tokens

Each GPU is a simulated engine; requests go round to the engines of a kind. Left out: links that disturb each other at
the receiver, layers that move while later ones are still computed, and room on the prefill side for keys and values
that wait: they leave it when the prompt is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cbref.engine import Engine
from cbref.hardware import Hardware, ModelShape, find_model
from cbref.metrics import RequestMetrics
from cbref.request import Request
from cbref.schedulers import Scheduler
from cbref.workloads import Workload, serve


class DecodeScheduler(Scheduler):
    """For requests whose prompt was computed elsewhere and whose last token came with it: they begin with a decode.

    Who is preempted has lost what was sent, and is computed again here, as one long prompt.
    """

    def __init__(self, max_num_seqs: int = 128, admission: str = "optimistic", **options):
        super().__init__(max_num_seqs, admission=admission, **options)
        if self.prefix_caching or self.max_num_batched_tokens < float("inf"):
            raise ValueError("prefix_caching and max_num_batched_tokens are about prompts; leave them out here")

    def admit(self, now: float) -> None:
        before = len(self.running)
        super().admit(now)
        for request in self.running[before:]:
            if not request.preemptions:
                request.num_computed = len(request.prompt) - 1


def serve_colocated(
    work: Workload, gpus: int, policy: str, *, model: str | ModelShape, hardware: str | Hardware, **options
) -> list[RequestMetrics]:
    """The workload on ``gpus`` engines that do both phases; ``options`` are the policy's. In the order of arrival."""
    _check("gpus", gpus)
    engines = [Engine.simulated(policy, model=model, hardware=hardware, record=False, **options) for _ in range(gpus)]
    return [RequestMetrics.of(request) for request in _round_robin(work, engines)]


def serve_disaggregated(
    work: Workload,
    prefill_gpus: int,
    decode_gpus: int,
    *,
    model: str | ModelShape,
    hardware: str | Hardware,
    link: float,
    max_num_seqs: int = 128,
    max_num_batched_tokens: int = 2048,
) -> list[RequestMetrics]:
    """The workload on separate engines for the two phases. In the order of arrival.

    link                    bytes/s at which each prefill engine sends keys and values, one request after the other
    max_num_seqs            most requests at once on a decode engine
    max_num_batched_tokens  most tokens in a step of a prefill engine
    """
    _check("prefill_gpus", prefill_gpus)
    _check("decode_gpus", decode_gpus)
    if not link > 0:
        raise ValueError(f"link is {link!r}; it must be above 0 bytes/s")
    options = {"model": model, "hardware": hardware, "record": False}
    budget = {"max_num_batched_tokens": max_num_batched_tokens, "max_batch_size": max_num_batched_tokens}
    one = [replace(p, max_tokens=1) for p in work.params]
    prefills = [Engine.simulated("sarathi", **budget, **options) for _ in range(prefill_gpus)]
    first = _round_robin(replace(work, params=one), prefills)

    unfinished = {i: request for i, request in enumerate(first) if work.params[i].max_tokens > 1}
    ready = send(unfinished, prefill_gpus, find_model(model).kv_bytes_per_token / link)
    order = sorted(ready, key=lambda i: (ready[i], i))
    if not order:
        return [RequestMetrics.of(request) for request in first]
    handed_over = Workload(
        # the first token is the last of the prompt now; the simulator does not ask which it is
        [range(work.prompts[i][0], work.prompts[i][0] + len(work.prompts[i]) + 1) for i in order],
        [replace(work.params[i], max_tokens=work.params[i].max_tokens - 1) for i in order],
        [ready[i] for i in order],
    )
    decodes = [Engine.simulated(DecodeScheduler(max_num_seqs), **options) for _ in range(decode_gpus)]
    rest = dict(zip(order, _round_robin(handed_over, decodes), strict=True))
    return [_joined(request, rest.get(i)) for i, request in enumerate(first)]


def send(requests: Mapping[int, Request], senders: int, seconds_per_token: float) -> dict[int, float]:
    """When each request's keys and values have arrived; sender ``i`` modulo their number has those of request ``i``."""
    ready, free = {}, [0.0] * senders
    for i in sorted(requests, key=lambda i: requests[i].finished):
        begin = max(requests[i].finished, free[i % senders])
        ready[i] = free[i % senders] = begin + seconds_per_token * len(requests[i].prompt)
    return ready


def _round_robin(work: Workload, engines: Sequence[Engine]) -> list[Request]:
    """Serve request ``i`` on engine ``i`` modulo their number; all requests in their order."""
    requests: list[Request] = [None] * len(work)
    for k, engine in enumerate(engines):
        mine = slice(k, None, len(engines))
        part = Workload(work.prompts[mine], work.params[mine], work.arrivals[mine])
        requests[mine] = serve(engine, part, progress=False)
    return requests


def _joined(first: Request, rest: Request | None) -> RequestMetrics:
    if rest is None:
        return RequestMetrics.of(first)
    times = [*first.token_times, *rest.token_times]
    return RequestMetrics(first.arrival, first.admitted, times, rest.finished, first.preemptions + rest.preemptions)


def _check(name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} is {count!r}; it must be an integer of at least 1")
