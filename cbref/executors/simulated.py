"""The executor's contract answered by arithmetic: no tensors, a clock that jumps."""

from __future__ import annotations

from cbref.kv_cache import BlockPool
from cbref.request import Chunk, Request, Sampled


class SimulatedExecutor:
    """Every step takes ``step_time`` seconds; every token is ``token_id``, so outputs end by ``max_tokens`` alone.

    With the default of one second a step, times are step counts: the arithmetic of the source document's figures.
    Subclasses override ``step_seconds``.
    """

    vocab_size = None
    tokenizer = None
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(
        self,
        step_time: float = 1.0,
        num_blocks: int = 1 << 20,
        block_size: int = 16,
        max_model_len: int = 1 << 20,
        token_id: int = 0,
    ):
        if not step_time > 0:
            raise ValueError(f"step_time is {step_time!r}; it must be above 0 seconds")
        self.step_time = step_time
        self.num_blocks, self.block_size, self.max_model_len = num_blocks, block_size, max_model_len
        self._sampled = Sampled(token_id)
        self._now = 0.0

    def step_seconds(self, chunks: list[Chunk]) -> float:
        return self.step_time

    def execute(self, chunks: list[Chunk], pool: BlockPool) -> list[Sampled | None]:
        self._now += self.step_seconds(chunks)
        return [self._sampled if chunk.yields_token else None for chunk in chunks]

    def now(self) -> float:
        return self._now

    def wait_until(self, time: float) -> None:
        self._now = max(self._now, time)

    def release(self, request: Request) -> None:
        pass
