"""Executors compute a step's chunks: with a real model (``model.py``), or by arithmetic on a virtual clock."""

from __future__ import annotations

from typing import Protocol

from cbref.kv_cache import BlockPool
from cbref.request import Chunk, Request, Sampled


class Executor(Protocol):
    """The contract. An engine asks nothing else, so a learner's own executor or a fake one in a test will do."""

    num_blocks: int
    block_size: int
    max_model_len: int  # longest prompt + output, tokens
    vocab_size: int | None  # None: any token id will do
    eos_token_ids: frozenset[int]
    tokenizer: object | None  # None: prompts are token ids, texts are empty

    def execute(self, chunks: list[Chunk], pool: BlockPool) -> list[Sampled | None]:
        """Compute the chunks in one step. One entry a chunk: the token of a chunk that yields one, else None."""

    def now(self) -> float:
        """Seconds of this executor's clock."""

    def wait_until(self, time: float) -> None:
        """Let the clock reach ``time``: there is nothing to do before a request arrives."""

    def release(self, request: Request) -> None:
        """The request is gone; forget what was kept for it."""
