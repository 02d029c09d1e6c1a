"""A GPU that exists only as numbers: the time of each step follows from what the step computes and reads."""

from __future__ import annotations

from cbref.executors.simulated import SimulatedExecutor
from cbref.hardware import Hardware, ModelShape
from cbref.request import Chunk


class RooflineExecutor(SimulatedExecutor):
    """Linear layers by packed tokens, attention by context, LM head by tokens that are sampled, plus a fixed overhead.

    ``num_blocks`` None: as many as fit into 90 % of the GPU's memory beside the weights.
    """

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_model_len: int = 1 << 20,
    ):
        if num_blocks is None:
            num_blocks = max(1, hardware.kv_capacity(model) // block_size)
        super().__init__(num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len)
        self.model, self.hardware = model, hardware
        # Decodes are many and alike: their cost is two numbers times their total context, worked out once.
        self._kv_token = hardware.kv_read_seconds(model, 1)

    def step_seconds(self, chunks: list[Chunk]) -> float:
        tokens = rows = decode_context = 0
        seconds = self.hardware.overhead
        for chunk in chunks:
            length = chunk.stop - chunk.start
            tokens += length
            rows += chunk.yields_token
            if length == 1:
                decode_context += chunk.stop
            else:
                seconds += self.hardware.chunk_attention_seconds(self.model, chunk.start, chunk.stop)
        seconds += decode_context * self._kv_token
        seconds += self.hardware.linear_seconds(self.model, tokens) + self.hardware.head_seconds(self.model, rows)
        return seconds
