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
    """Step times put together from measured parts instead of computed from rates.

    A step costs a base that depends on its packed tokens (``tokens`` -> ``seconds``, interpolated); with decodes in it
    also ``per_decode_step``, ``per_decode`` for each, and ``per_context`` for each token behind them; ``per_chunk`` for
    each chunk of a prompt, and ``per_pair`` for each pair of tokens that attend in it.
    """

    tokens: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    per_decode_step: float = 0.0
    per_decode: float = 0.0
    per_context: float = 0.0
    per_chunk: float = 0.0
    per_pair: float = 0.0

    def linear_seconds(self, model: ModelShape, tokens: int) -> float:
        over = max(0, tokens - self.tokens[-1])  # beyond the last point the curve goes on as steeply as before it
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.tokens[-1] - self.tokens[-2])
        return float(np.interp(tokens, self.tokens, self.seconds)) + over * slope

    def head_seconds(self, model: ModelShape, rows: int) -> float:
        return 0.0  # part of the other measurements: every measured chunk is sampled

    def chunk_attention_seconds(self, model: ModelShape, start: int, stop: int) -> float:
        return self.per_chunk + self.per_pair * _pairs(start, stop)

    def decode_seconds(self, model: ModelShape, requests: int, context: int) -> float:
        return self.per_decode_step + self.per_decode * requests + self.per_context * context


def calibrate(
    executor,
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
    chunks: Sequence[int] = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256),
    contexts: tuple[int, int] = (32, 256),
    repeat: int = 5,
    progress: bool = True,
) -> MeasuredHardware:
    """Time steps of a ``ModelExecutor``: decodes by batch size and context, chunks by size and what precedes them.

    Takes about half a minute on a laptop. The executor must be at rest, for the cache is written over.
    """
    far = max(contexts)
    longest = max(chunks)
    steps = {("decode", b, c): [(c, c + 1)] * b for b in batch_sizes for c in contexts}
    steps |= {("chunk", n): [(0, n)] for n in chunks}
    steps |= {"halves": [(0, longest // 2)] * 2, "later": [(far, far + longest)]}
    times: dict = {name: [] for name in steps}
    quiet = {} if progress else {"disable": True}
    with tqdm(total=(repeat + 1) * len(steps), unit="step", desc="calibrate", delay=2, **quiet) as bar:
        for turn in range(repeat + 1):  # in rounds, so that a slow moment of the machine touches all points alike
            for name, step in steps.items():
                seconds = _time(executor, step)
                if turn:  # the first round warms up
                    times[name].append(seconds)
                bar.update()
    best = {name: statistics.median(values) for name, values in times.items()}

    per_pair = (best["later"] - best["chunk", longest]) / (_pairs(far, far + longest) - _pairs(0, longest))
    fewer = _pairs(0, longest) - 2 * _pairs(0, longest // 2)
    per_chunk = best["halves"] - best["chunk", longest] + per_pair * fewer
    base = {n: best["chunk", n] - per_chunk - per_pair * _pairs(0, n) for n in chunks}
    # a decode is told from the base by what grows with its context, with the batch, and with neither
    points = [(b, c) for b in batch_sizes if b in base for c in contexts]
    extra = [best["decode", b, c] - base[b] for b, c in points]
    columns = np.array([[1.0, b, b * (c + 1)] for b, c in points])
    per_decode_step, per_decode, per_context = np.linalg.lstsq(columns, np.array(extra), rcond=None)[0].tolist()
    alone = [best["decode", 1, c] - per_decode_step - per_decode - per_context * (c + 1) for c in contexts]
    tokens, seconds = zip(*sorted({1: statistics.mean(alone), **base}.items()), strict=True)
    return MeasuredHardware(
        "this machine", flops=0.0, bandwidth=0.0, memory=0.0, overhead=_between_steps(executor, max(batch_sizes)),
        tokens=tokens, seconds=seconds, per_decode_step=per_decode_step, per_decode=per_decode, per_context=per_context,
        per_chunk=per_chunk, per_pair=per_pair,
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
