"""One step, looked at closely: do the backends agree, and does the host wait for the device?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from cbref import SamplingParams
from cbref.attention import pack_step
from cbref.executors.graphs import to_device
from cbref.executors.model import ModelExecutor
from cbref.kv_cache import BlockPool
from cbref.request import Chunk, Request
from gpu.machine import NO_GPU, Machine
from gpu.model import make_executor
from gpu.parts import Row, attempt, check, not_run

LOGITS_BOUND = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # roundings of all layers add up


def _prefilled(machine: Machine, executor: ModelExecutor, chunk: int) -> tuple[BlockPool, list[Chunk]]:
    """Requests whose prompts are in the cache but for what the next step computes, and that step.

    It is a step of decodes, but for the last request, which has ``chunk`` tokens to go.
    """
    rng, pool = np.random.default_rng(0), BlockPool(executor.num_blocks, executor.block_size)
    past, step = [], []
    for i, length in enumerate([130, 257, 400, 512] if machine.cuda else [5, 18, 20]):
        ids = rng.integers(1, executor.vocab_size, length).tolist()
        request = Request(f"look-{i}", ids, SamplingParams(max_tokens=1))
        pool.grow(request.id, length)
        past.append(Chunk(request, 0, length - chunk))
        step += [Chunk(request, length - chunk, length)]
    if chunk > 1:  # the others have one token to go
        past[:-1] = [Chunk(c.request, 0, c.request.num_tokens - 1) for c in past[:-1]]
        step[:-1] = [Chunk(c.request, c.request.num_tokens - 1, c.request.num_tokens) for c in step[:-1]]
    executor.execute(past, pool)
    return pool, step


def _forward(executor: ModelExecutor, pool: BlockPool, step: list[Chunk], graphs: bool = False) -> torch.Tensor:
    """What ``ModelExecutor.execute`` does before it samples."""
    if graphs:
        numbers, shape = pack_step(step, pool, pad=executor._graphs.bucket(step, executor.block_size))
        return executor._graphs(numbers, shape)[: len(step)]
    numbers, shape = pack_step(step, pool)
    return executor._forward(to_device(numbers, executor.device), shape)


@torch.inference_mode()
def _logits(machine: Machine, chunk: int, graphs: bool = False, **options) -> torch.Tensor:
    executor = make_executor(machine, graphs=graphs, **options)
    return _forward(executor, *_prefilled(machine, executor, chunk), graphs).clone()


BACKENDS = {
    "triton": {"attention": "triton"},
    "triton_mixed": {"attention": "triton_mixed"},
    "triton + kernels": {"attention": "triton", "kernels": True},
    "triton + kernels + graphs": {"attention": "triton", "kernels": True, "graphs": True},
}


def backends_agree(machine: Machine) -> Iterator[Row]:
    """Logits of one step by every backend, relative to the largest logit."""
    for kind, chunk in (("decodes", 1), ("decodes and a chunk", 4)):
        expected = _logits(machine, chunk, attention="torch")
        for name, options in BACKENDS.items():
            what = f"logits by {name}, {kind}"
            if options.get("graphs") and chunk > 1:  # only steps of decodes are replayed
                continue
            if options.get("graphs") and not machine.cuda:
                yield not_run(what, NO_GPU)
            else:
                yield from attempt(what, _agree(machine, what, chunk, options, expected))
                machine.release()


def _agree(machine: Machine, what: str, chunk: int, options: dict, expected: torch.Tensor) -> Iterator[Row]:
    logits = _logits(machine, chunk, **options)
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    yield check(what, error, LOGITS_BOUND[machine.dtype])


def no_host_waits(machine: Machine) -> Iterator[Row]:
    """One step under torch's debug mode that raises where the host would wait for the device."""
    for attention, graphs, chunk in (
        ("triton", True, 1),
        ("triton", False, 1),
        ("triton", False, 4),
        ("torch", False, 4),
    ):
        kind = "decodes as a CUDA graph" if graphs else "decodes" if chunk == 1 else "decodes and a chunk"
        what = f"host waits in a step, {attention}, {kind}"
        if not machine.cuda:
            yield not_run(what, NO_GPU)
        else:
            yield from attempt(what, _waits(machine, what, attention, graphs, chunk))
            machine.release()


@torch.inference_mode()
def _waits(machine: Machine, what: str, attention: str, graphs: bool, chunk: int) -> Iterator[Row]:
    executor = make_executor(machine, attention, graphs=graphs)
    pool, step = _prefilled(machine, executor, chunk)
    _forward(executor, pool, step, graphs)  # compiles and captures, which may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _forward(executor, pool, step, graphs)
        waited = ""
    except RuntimeError as error:
        waited = str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    yield check(what, float(bool(waited)), 0, raised=waited)
