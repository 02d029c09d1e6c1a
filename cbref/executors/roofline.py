"""A GPU that exists only as numbers: the time of each step follows from what the step computes and reads."""

from __future__ import annotations

from dataclasses import dataclass

from cbref.executors.simulated import SimulatedExecutor
from cbref.hardware import Hardware, ModelShape, find_hardware, find_model
from cbref.request import Chunk


@dataclass
class Work:
    """Sums over all steps: time, arithmetic, and bytes that had to be read."""

    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


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
        self._work = Work()

    def step_seconds(self, chunks: list[Chunk]) -> float:
        hardware, model, work = self.hardware, self.model, self._work
        tokens = rows = decodes = decode_context = prefill_context = pairs = 0
        seconds = 0.0
        for chunk in chunks:
            start, stop = chunk.start, chunk.end
            tokens += stop - start
            rows += chunk.yields_token and 1 + stop - chunk.stop
            if stop - start == 1:
                decodes += 1
                decode_context += stop
            else:
                prefill_context += stop
                pairs += (start + 1 + stop) * (stop - start) // 2
                seconds += hardware.chunk_attention_seconds(model, start, stop)
        if decodes:  # many and alike: one call for all
            seconds += hardware.decode_seconds(model, decodes, decode_context)
        seconds += hardware.linear_seconds(model, tokens) + hardware.head_seconds(model, rows)
        seconds += hardware.fixed_seconds(model, tokens)
        work.seconds += seconds
        work.flops += 2 * (model.linear_params * tokens + model.head_params * rows)
        work.flops += 4 * model.layers * model.heads * model.head_dim * (pairs + decode_context)
        weights = model.linear_params + (model.head_params if rows else 0)
        work.bytes += weights * model.dtype_bytes + model.kv_bytes_per_token * (decode_context + prefill_context)
        return seconds

    def utilisation(self) -> dict[str, float | None]:
        """MFU and MBU over all steps: what was needed, as a share of what the GPU could have done in that time."""
        work, gpu = self._work, self.hardware
        if not work.seconds or not gpu.flops:  # nothing done yet, or a machine whose rates are not known
            return {"mfu": None, "mbu": None}
        return {
            "mfu": work.flops / (work.seconds * gpu.flops * gpu.tp),
            "mbu": work.bytes / (work.seconds * gpu.bandwidth * gpu.tp),
        }


def make_simulator(
    model: str | ModelShape | None,
    hardware: str | Hardware | None,
    tp: int | None = None,
    step_time: float | None = None,
    **sizes,
) -> SimulatedExecutor:
    """With a model or a GPU a roofline; with neither, steps of ``step_time`` seconds (None: 1) and ample memory."""
    if model is None and hardware is None:
        if tp is not None:
            raise ValueError(f"tp is {tp}, but there is no GPU; give model or hardware, too")
        if sizes.get("num_blocks") is None:
            sizes["num_blocks"] = 1 << 20
        return SimulatedExecutor(1.0 if step_time is None else step_time, **sizes)
    if step_time is not None:
        raise ValueError(f"step_time is {step_time}, but model and hardware decide that; leave it out")
    return RooflineExecutor(find_model(model or "llama-3-8b"), find_hardware(hardware or "h100", tp), **sizes)
