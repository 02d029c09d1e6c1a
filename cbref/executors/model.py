"""A real model behind the executor's contract: one packed forward pass a step over a paged KV cache.

The pass is one row ``[1, T]`` of all chunks' tokens, prompts and decodes alike. Everything but attention works on
single tokens and does not mind; attention reads the metadata and keeps the requests apart (Orca's selective batching).
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Mapping

import torch

from cbref.attention import NAME, StepMeta, StepShape, adopt, pack_step
from cbref.executors.graphs import DecodeGraphs, to_device
from cbref.kv_cache import BlockPool
from cbref.request import Chunk, Request, Sampled, SamplingParams
from cbref.sampling import Sampler
from cbref.speculation import verify
from cbref.triton_attention import choose
from cbref.triton_modules import replace_modules


class ModelExecutor:
    """Runs a ``transformers`` decoder that ``load_model`` prepared.

    attention    None: what suits the device. "torch", "triton" or "triton_mixed" (``cbref.triton_attention``), or a
                 function with the signature of ``cbref.attention.torch_attention``
    use_kernels  Triton kernels for the model's RMSNorm and rotary embedding too, where they compute the same: True, or
                 functions of your own, {"rmsnorm": f, "rope": g} or one of them (``cbref.triton_modules``)
    cuda_graphs  replay steps that only decode as CUDA graphs. None: on a GPU, unless the attention is a function of
                 yours, which may do what a graph cannot hold

    ``attention_choice`` says what was chosen and why. Other arguments as in ``Engine.from_pretrained``.
    """

    def __init__(
        self,
        model,
        tokenizer=None,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        attention: str | Callable | None = None,
        use_kernels: bool | Mapping[str, Callable] = False,
        cuda_graphs: bool | None = None,
    ):
        config = model.config
        if config._attn_implementation != NAME:
            adopt(model)
        limit = getattr(config, "max_position_embeddings", None)
        for name, value in (("block_size", block_size), ("num_blocks", num_blocks), ("max_model_len", max_model_len)):
            if value is None and name != "block_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        if max_model_len is not None and (max_model_len < 2 or (limit and max_model_len > limit)):
            raise ValueError(f"max_model_len is {max_model_len}; this model's context allows 2 to {limit} tokens")
        self.model, self.tokenizer = model, tokenizer
        self.max_model_len = max_model_len or limit or 2048
        self.vocab_size = config.vocab_size
        self.eos_token_ids = _eos_ids(model, tokenizer)
        self.block_size = block_size
        self.device = model.device
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.attention, self.attention_choice = choose(attention, config.num_attention_heads, heads, dim, model)
        self.replaced = replace_modules(model, use_kernels) if use_kernels else {}
        block_bytes = 2 * config.num_hidden_layers * block_size * heads * dim * model.dtype.itemsize
        self.num_blocks = num_blocks if num_blocks is not None else self._default_blocks(block_bytes, max_num_seqs)
        blocks = self.num_blocks + 1  # the last is the null block
        shape = (config.num_hidden_layers, 2, blocks, block_size, heads, dim)
        self._cache = torch.zeros(shape, dtype=model.dtype, device=self.device)
        self._caches = [tuple(layer) for layer in self._cache]
        self._sampler = Sampler(self.eos_token_ids, self.device)
        if cuda_graphs and self.device.type != "cuda":
            raise ValueError(f"cuda_graphs is True, but the model is on {self.device}; leave it out, or use a GPU")
        wanted = self.device.type == "cuda" and not callable(attention) if cuda_graphs is None else cuda_graphs
        self._graphs = DecodeGraphs(self._forward, self.device, strict=cuda_graphs is True) if wanted else None
        self._started = time.perf_counter()
        self._try_one_token()

    def _try_one_token(self) -> None:
        """A model that packing or our attention does not suit says so now, not at a user's first request."""
        request, pool = Request("trial", [0], SamplingParams()), BlockPool(self.num_blocks, self.block_size)
        pool.grow(request.id, 1)
        try:
            self.execute([Chunk(request, 0, 1)], pool)
        except Exception as error:
            raise ValueError(f"cbref cannot serve a {type(self.model).__name__}: {error}") from error

    def _default_blocks(self, block_bytes: int, max_num_seqs: int) -> int:
        enough = max_num_seqs * -(-self.max_model_len // self.block_size)
        budget = 1 << 30
        if self.device.type == "cuda":
            gc.collect()  # executors that are gone may still hold their memory
            torch.cuda.empty_cache()
            budget = int(0.8 * torch.cuda.mem_get_info(self.device)[0])
        return max(1, min(enough, budget // block_bytes))

    def execute(self, chunks: list[Chunk], pool: BlockPool) -> list[Sampled | None]:
        with torch.inference_mode(), self._device_context():
            return self._execute(chunks, pool)

    def _device_context(self):
        """Triton launches on the current device, and graphs record there: it has to be the model's."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _execute(self, chunks: list[Chunk], pool: BlockPool) -> list[Sampled | None]:
        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i]) > 1)  # decodes first
        ordered = [chunks[i] for i in order]
        if self._graphs and all(len(c) == 1 and c.yields_token for c in ordered):
            rows, shape = pack_step(ordered, pool, pad=self._graphs.bucket(ordered, self.block_size))
            logits = self._graphs(rows, shape)[: len(ordered)]
        else:
            rows, shape = pack_step(ordered, pool)
            logits = self._forward(to_device(rows, self.device), shape)
        ends = [i for i in order if chunks[i].yields_token]
        if not ends and self.device.type == "cuda":  # no token to wait for: wait for the step, whose time is recorded
            torch.cuda.synchronize(self.device)
        asking = [chunks[i].request for i in ends for _ in (0, *chunks[i].draft)]
        answers = iter(self._sampler(asking, logits))
        sampled: list[Sampled | None] = [None] * len(chunks)
        for i in ends:
            sampled[i] = verify(chunks[i].draft, [next(answers) for _ in (0, *chunks[i].draft)])
        broken = [chunks[i].request.id for i in ends if any(s.error for s in (sampled[i], *sampled[i].following))]
        if broken:  # whatever is in their blocks must not reach the next owner
            self._cache[:, :, pool.forget(*broken)] = 0
        return sampled

    def _forward(self, rows: torch.Tensor, shape: StepShape) -> torch.Tensor:
        """Logits [ends, vocabulary] of a packed step, in float32."""
        meta = StepMeta.unpack(rows, shape, self.block_size, self._caches, self.attention)
        out = self.model(
            meta.ids[None], position_ids=meta.positions[None], use_cache=False, logits_to_keep=meta.ends, cb_meta=meta
        )
        return out.logits[0].float()

    def now(self) -> float:
        return time.perf_counter() - self._started

    def wait_until(self, when: float) -> None:
        time.sleep(max(0.0, when - self.now()))

    def release(self, request: Request) -> None:
        self._sampler.release(request)


def _eos_ids(model, tokenizer) -> frozenset[int]:
    """All ids that end a sequence: what the generation config says, else the model's config, else the tokenizer."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, (list, tuple)) else [ids])
    return frozenset()
