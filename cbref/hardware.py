"""GPUs and models as numbers: what a step has to compute and to move, and how fast that can go.

The roofline (Williams et al., 2009): a piece of work takes as long as its arithmetic or its memory traffic, whichever
is longer. Peak rates are dense bf16/fp16 values; ``mfu`` and ``mbu`` say which share of them is reached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

TILE = 128  # rows of a matrix that a GPU multiplies at a time: 129 tokens cost as much as 256


@dataclass(frozen=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated MLP. Sizes in elements, ``dtype_bytes`` bytes each."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gated: bool = True
    dtype_bytes: int = 2

    @property
    def linear_params(self) -> int:
        """Weights that every token passes through: attention projections and MLP, without embedding and LM head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + (3 if self.gated else 2) * self.hidden * self.intermediate)

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @classmethod
    def from_config(cls, config, name: str = "", dtype_bytes: int = 2) -> ModelShape:
        """From a ``transformers`` config of a Llama-like decoder."""
        heads = config.num_attention_heads
        return cls(
            name or getattr(config, "name_or_path", "") or config.model_type,
            config.num_hidden_layers, config.hidden_size, heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            config.intermediate_size, config.vocab_size, dtype_bytes=dtype_bytes,
        )  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """One GPU, or ``tp`` of them that share each layer (tensor parallelism).

    What the GPUs tell each other is free unless ``link`` says otherwise: two all-reduces of activations a layer.
    """

    name: str
    flops: float  # FLOP/s
    bandwidth: float  # bytes/s
    memory: float  # bytes
    mfu: float = 0.7  # share of ``flops`` that matrix products reach
    mbu: float = 0.8  # share of ``bandwidth`` that reading weights and cache reaches
    overhead: float = 0.0  # seconds that every step takes besides
    tp: int = 1
    link: float = math.inf  # bytes/s at which an all-reduce goes through
    sync: float = 0.0  # seconds that an all-reduce takes however little is in it
    tile: int = TILE

    @property
    def ridge(self) -> float:
        """FLOP per byte at which arithmetic and memory take equally long; in bf16 also tokens per step."""
        return self.flops / self.bandwidth

    def linear_seconds(self, model: ModelShape, tokens: int) -> float:
        """All linear layers for a step of ``tokens`` tokens."""
        rows = -(-tokens // self.tile) * self.tile
        arithmetic = 2 * model.linear_params * rows / (self.flops * self.mfu)
        traffic = model.linear_params * model.dtype_bytes / (self.bandwidth * self.mbu)
        return max(arithmetic, traffic) / self.tp

    def head_seconds(self, model: ModelShape, rows: int) -> float:
        """The LM head for the ``rows`` tokens whose logits are wanted."""
        if rows == 0:
            return 0.0
        arithmetic = 2 * model.head_params * rows / (self.flops * self.mfu)
        traffic = model.head_params * model.dtype_bytes / (self.bandwidth * self.mbu)
        return max(arithmetic, traffic) / self.tp

    def chunk_attention_seconds(self, model: ModelShape, start: int, stop: int) -> float:
        """Attention of tokens ``start:stop`` over everything up to each of them."""
        pairs = (start + 1 + stop) * (stop - start) / 2
        arithmetic = 4 * model.layers * model.heads * model.head_dim * pairs / (self.flops * self.mfu)
        return max(arithmetic / self.tp, self.kv_read_seconds(model, stop))

    def fixed_seconds(self, model: ModelShape, tokens: int) -> float:
        """What a step takes besides computing and reading: its overhead, and all-reduces between GPUs."""
        if self.tp == 1:
            return self.overhead
        moved = 2 * (self.tp - 1) / self.tp * tokens * model.hidden * model.dtype_bytes  # a ring all-reduce
        return self.overhead + 2 * model.layers * (self.sync + moved / self.link)

    def decode_seconds(self, model: ModelShape, requests: int, context: int) -> float:
        """Attention of ``requests`` decodes with ``context`` tokens behind them in all: it waits for the cache."""
        return self.kv_read_seconds(model, context)

    def kv_read_seconds(self, model: ModelShape, tokens: int) -> float:
        """Reading the keys and values of ``tokens`` tokens once: what decodes wait for."""
        return model.kv_bytes_per_token * tokens / (self.bandwidth * self.mbu) / self.tp

    def kv_capacity(self, model: ModelShape, utilisation: float = 0.9) -> int:
        """Tokens whose keys and values fit beside the weights in ``utilisation`` of the memory."""
        weights = (model.linear_params + 2 * model.head_params) * model.dtype_bytes
        room = utilisation * self.memory * self.tp - weights
        if room < model.kv_bytes_per_token:
            raise ValueError(
                f"{model.name} needs {weights / 1e9:.0f} GB for its weights; {self.tp} × {self.name} have "
                f"{utilisation:.0%} of {self.memory * self.tp / 1e9:.0f} GB: raise tp"
            )
        return int(room // model.kv_bytes_per_token)


MODELS = {
    m.name: m
    for m in (
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49_152),
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11_008, 32_000),
        ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 28_672, 32_000),
        ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14_336, 128_256),
        ModelShape("llama-3-70b", 80, 8192, 64, 8, 128, 28_672, 128_256),
        ModelShape("bloom-176b", 70, 14_336, 112, 112, 128, 57_344, 250_880, gated=False),
    )
}

# Dense fp16/bf16 rates. A100, H100: NVIDIA data sheets as quoted by glennklockwood.com, which also lists B200 (HGX,
# 1 kW). T4 (fp16 only), L4 and H200: third-party specification pages; L4 is half of its figure with sparsity.
HARDWARE = {
    h.name: h
    for h in (
        Hardware("t4", 65e12, 0.320e12, 16e9),
        Hardware("l4", 121e12, 0.300e12, 24e9),
        Hardware("a100-40", 312e12, 1.555e12, 40e9),
        Hardware("a100", 312e12, 2.039e12, 80e9),
        Hardware("h100", 989.4e12, 3.35e12, 80e9),
        Hardware("h200", 989.4e12, 4.8e12, 141e9),
        Hardware("b200", 2250e12, 8e12, 180e9),
    )
}


def find_model(model: str | ModelShape) -> ModelShape:
    if isinstance(model, ModelShape):
        return model
    if model not in MODELS:
        raise ValueError(f"unknown model shape {model!r}; choose one of {', '.join(MODELS)}, or pass a ModelShape")
    return MODELS[model]


def find_hardware(hardware: str | Hardware, tp: int | None = None) -> Hardware:
    if not isinstance(hardware, Hardware):
        if hardware not in HARDWARE:
            raise ValueError(f"unknown hardware {hardware!r}; choose one of {', '.join(HARDWARE)}, or pass a Hardware")
        hardware = HARDWARE[hardware]
    if tp is None:
        return hardware
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise ValueError(f"tp is {tp!r}; it must be an integer of at least 1 (how many GPUs share each layer)")
    return replace(hardware, tp=tp)
