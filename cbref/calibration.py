"""This machine as a ``Hardware``: time some steps of the real engine, and the simulator can predict a whole run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from tqdm import tqdm

from cbref.engine import Engine
from cbref.hardware import Hardware, ModelShape
from cbref.kv_cache import BlockPool
from cbref.request import Chunk, Request, SamplingParams


@dataclass(frozen=True)
class MeasuredHardware(Hardware):
    """Step times read off a measured curve instead of computed from rates.

    A step costs a base that depends on its packed tokens (``tokens`` -> ``seconds``, interpolated), ``per_context``
    seconds for each token of context that decodes read, ``per_pair`` for each pair of tokens that attend in prompts,
    and ``per_chunk`` for each chunk of a prompt.
    """

    tokens: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    per_context: float = 0.0
    per_pair: float = 0.0
    per_chunk: float = 0.0

    def linear_seconds(self, model: ModelShape, tokens: int) -> float:
        over = max(0, tokens - self.tokens[-1])  # beyond the last point the curve goes on as steeply as before it
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.tokens[-1] - self.tokens[-2])
        return float(np.interp(tokens, self.tokens, self.seconds)) + over * slope

    def head_seconds(self, model: ModelShape, rows: int) -> float:
        return 0.0  # part of the curve: measured steps sample, too

    def chunk_attention_seconds(self, model: ModelShape, start: int, stop: int) -> float:
        return self.per_chunk + self.per_pair * _pairs(start, stop)

    def kv_read_seconds(self, model: ModelShape, tokens: int) -> float:
        return self.per_context * tokens


def calibrate(
    executor,
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
    chunks: Sequence[int] = (16, 32, 64, 128, 256),
    contexts: tuple[int, int] = (32, 256),
    repeat: int = 5,
    progress: bool = True,
) -> MeasuredHardware:
    """Time steps of a ``ModelExecutor``: decodes by batch size and context, chunks by size and what precedes them.

    Takes about half a minute on a laptop. The executor must be at rest, for the cache is written over.
    """
    near, far = contexts
    plan = [("decode", b, c) for b in batch_sizes for c in contexts]
    plan += [("chunk", n, c) for n in chunks for c in (0, far)]
    times: dict[tuple, list[float]] = {key: [] for key in plan}
    quiet = {} if progress else {"disable": True}
    with tqdm(total=(repeat + 1) * len(plan), unit="step", desc="calibrate", delay=2, **quiet) as bar:
        for turn in range(repeat + 1):  # in rounds, so that a slow moment of the machine touches all points alike
            for kind, size, context in plan:
                step = [(context, context + 1)] * size if kind == "decode" else [(context, context + size)]
                seconds = _time(executor, step)
                if turn:  # the first round warms up
                    times[kind, size, context].append(seconds)
                bar.update()
    best = {key: statistics.median(values) for key, values in times.items()}
    widest, longest = max(batch_sizes), max(chunks)
    reads = widest * (far - near)
    per_context = max(0.0, (best["decode", widest, far] - best["decode", widest, near]) / reads)
    more = _pairs(far, far + longest) - _pairs(0, longest)
    per_pair = max(0.0, (best["chunk", longest, far] - best["chunk", longest, 0]) / more)
    curve = {b: best["decode", b, near] - per_context * b * near for b in batch_sizes}
    own = {n: best["chunk", n, 0] - per_pair * _pairs(0, n) for n in chunks}  # base and the cost of being a chunk
    known = [n for n in chunks if n <= widest]
    extra = [own[n] - float(np.interp(n, list(curve), list(curve.values()))) for n in known]
    per_chunk = max(0.0, statistics.median(extra)) if extra else 0.0
    curve |= {n: own[n] - per_chunk for n in chunks if n > widest}
    tokens, seconds = zip(*sorted(curve.items()), strict=True)
    return MeasuredHardware(
        "this machine", flops=0.0, bandwidth=0.0, memory=0.0, overhead=_between_steps(executor, widest), tokens=tokens,
        seconds=seconds, per_context=per_context, per_pair=per_pair, per_chunk=per_chunk,
    )  # fmt: skip


def _between_steps(executor, batch_size: int) -> float:
    """Seconds from the end of a step to the begin of the next: scheduling, bookkeeping, text."""
    engine = Engine(executor, "orca", max_num_seqs=batch_size)
    for _ in range(batch_size):
        engine.add_request([1, 2], SamplingParams(max_tokens=12, ignore_eos=True))
    while engine.has_work:
        engine.step()
    return statistics.median(b.begin - a.end for a, b in pairwise(engine.steps))


def _time(executor, step: Sequence[tuple[int, int]]) -> float:
    """Seconds for one step of chunks ``start:stop``, each of another made-up request."""
    pool = BlockPool(executor.num_blocks, executor.block_size)
    chunks = []
    for i, (start, stop) in enumerate(step):
        request = Request(f"calibrate-{i}", [1] * stop, SamplingParams(max_tokens=1))
        pool.grow(request.id, stop)
        chunks.append(Chunk(request, start, stop))
    begin = executor.now()
    executor.execute(chunks, pool)
    return executor.now() - begin


def _pairs(start: int, stop: int) -> float:
    return (start + 1 + stop) * (stop - start) / 2
