"""Attention over a paged cache, for all chunks of a step at once.

``transformers`` calls ``paged_attention`` in every layer of a model whose attention implementation is ``NAME``. The
step's metadata travels in one private keyword, ``cb_meta``: nothing is global, and no name that ``transformers`` may
claim is used.

Shapes: T tokens in the step, Hq query heads, Hkv KV heads (Hq a multiple of Hkv), D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface

from cbref.kv_cache import BlockPool
from cbref.request import Chunk

NAME = "cbref_paged"


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step's tensors, known on the host. Two steps of one shape can share a CUDA graph."""

    tokens: int  # T
    chunks: int  # B
    decodes: int  # chunks of one token; they come first, so that they are the packed rows 0 : decodes
    ends: int  # E, rows whose logits are wanted
    width: int  # N, blocks of the longest context
    decode_width: int  # the same, of the decodes alone
    longest: int  # tokens of the longest chunk
    long_chunks: tuple[tuple[int, int, int], ...] = ()  # the others: first row, last row + 1, tokens of context


@dataclass
class StepMeta:
    """Where a step's tokens stand and where their keys and values live.

    A *place* is ``block * block_size + offset``, an index into the cache seen as one row of tokens. The cache has one
    block more than the pool: the null block fills up the table and never belongs to a request; it is finite memory.

    ids, positions [T]      of each token, chunk after chunk
    places         [T]      where each token's key and value go
    ends           [E]      rows whose logits are wanted: the last of each chunk that yields a token, and its draft's
    query_start    [B + 1]  chunk i owns the packed rows query_start[i] : query_start[i + 1]
    context_len    [B]      tokens of the request up to the end of its chunk
    block_table    [B, N]   blocks of each request, padded with the null block
    """

    shape: StepShape
    block_size: int
    ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    block_table: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]  # per layer, keys and values [num_blocks + 1, block_size, Hkv, D]
    attend: Callable  # the backend

    @classmethod
    def unpack(cls, numbers: torch.Tensor, shape: StepShape, block_size: int, caches, attend: Callable) -> StepMeta:
        """From what ``pack_step`` made, on the device by now."""
        t, b = shape.tokens, shape.chunks
        sizes = [t, t, t, shape.ends, b + 1, b, b * shape.width]
        ids, positions, places, ends, query_start, context_len, table = numbers.split(sizes)
        table = table.view(b, shape.width)
        where = (ids, positions, places.long(), ends, query_start, context_len, table)
        return cls(shape, block_size, *where, caches, attend)

    @cached_property
    def decode_places(self) -> torch.Tensor:
        """Places of the decodes' contexts, [decodes, decode_width * block_size]; beyond a context, the null block."""
        places = self._places_of(self.block_table[: self.shape.decodes, : self.shape.decode_width])
        return torch.where(self.decode_seen, places, (len(self.caches[0][0]) - 1) * self.block_size)

    @cached_property
    def decode_seen(self) -> torch.Tensor:
        """Which of ``decode_places`` are tokens of the request."""
        n, longest = self.shape.decodes, self.shape.decode_width * self.block_size
        return torch.arange(longest, device=self.ids.device) < self.context_len[:n, None]

    @cached_property
    def long_places(self) -> list[torch.Tensor]:
        """For each long chunk, the places of its whole context."""
        tables = self.block_table[self.shape.decodes :]
        return [
            self._places_of(row)[:context] for row, (*_, context) in zip(tables, self.shape.long_chunks, strict=True)
        ]

    def _places_of(self, blocks: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(self.block_size, device=blocks.device)
        return (blocks[..., None] * self.block_size + offsets).flatten(-2)


def pack_step(chunks: list[Chunk], pool: BlockPool, pad: tuple[int, int] | None = None) -> tuple[np.ndarray, StepShape]:
    """A step as one row of integers, so that one copy brings it to the device. Chunks of one token come first.

    ``pad``: fill a step of decodes up to this many requests and this table width. A filler is the one-token prompt 0,
    whose key and value go to the null block; every row's logits are computed then.
    """
    size, null = pool.block_size, pool.num_blocks
    start = np.array([c.start for c in chunks])
    context = np.array([c.end for c in chunks])
    ids = [token for c in chunks for token in (*c.request.tokens(c.start, c.stop), *c.draft)]
    positions = np.concatenate([np.arange(c.start, c.end) for c in chunks])
    decodes = int((context - start == 1).sum())
    widths = -(-context // size)
    rows, width = (len(chunks), int(widths.max())) if pad is None else pad
    table = np.full((rows, width), null)
    for i, c in enumerate(chunks):
        blocks = pool.table(c.request.id)[: widths[i]]
        table[i, : len(blocks)] = blocks
    if fill := rows - len(chunks):
        ids, positions = ids + [0] * fill, np.concatenate([positions, np.zeros(fill, int)])
        start, context = (np.concatenate([x, np.full(fill, n)]) for x, n in ((start, 0), (context, 1)))
        decodes += fill
    owner = np.repeat(np.arange(rows), context - start)
    places = table[owner, positions // size] * size + positions % size
    query_start = np.concatenate([[0], np.cumsum(context - start)])
    ends = query_start[1:] - 1
    if pad is None:  # a guess and the token before it each ask for the token behind them
        asking = [np.arange(-len(c.draft), 1) + end for c, end in zip(chunks, ends, strict=True) if c.yields_token]
        ends = np.concatenate([np.empty(0, int), *asking])
    long_chunks = zip(query_start[decodes:], query_start[decodes + 1 :], context[decodes:], strict=False)
    shape = StepShape(
        len(ids),
        rows,
        decodes,
        len(ends),
        width,
        width if pad else int(widths[:decodes].max(initial=0)),
        int((context - start).max()),
        tuple((int(a), int(b), int(c)) for a, b, c in long_chunks),
    )
    row = np.concatenate([ids, positions, places, ends, query_start, context, table.ravel()])
    return row.astype(np.int32), shape


def paged_attention(
    module,
    query,
    key,
    value,
    attention_mask=None,
    *,
    cb_meta: StepMeta,
    scaling=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    **_,
):
    """What ``transformers`` calls: query [1, Hq, T, D], key and value [1, Hkv, T, D] after rotary -> [1, T, Hq, D]."""
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("attention with soft-capped logits or sinks is not implemented in cbref")
    keys, values = cb_meta.caches[module.layer_idx]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    return cb_meta.attend(*rows, keys, values, cb_meta, scale, sliding_window)[None], None


AttentionInterface.register(NAME, paged_attention)


def adopt(model) -> None:
    """Make a ``transformers`` decoder call ``paged_attention``; ``ValueError`` if it would not do so in all layers."""
    others = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others or not getattr(model, "_supports_attention_backend", False):
        why = f"has layers of {', '.join(sorted(others))}" if others else "does not let its attention be replaced"
        raise ValueError(
            f"the model is a {type(model).__name__}, which {why} (transformers' AttentionInterface); "
            "choose a decoder such as Llama, Qwen3 or Mistral"
        )
    model.set_attn_implementation(NAME)


def write(k, v, key_cache, value_cache, meta: StepMeta) -> None:
    """Put the step's keys and values [T, Hkv, D] into the cache."""
    for rows, cache in ((k, key_cache), (v, value_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, meta.places, rows)


def decode(q, key_cache, value_cache, meta: StepMeta, scale: float, window: int | None = None) -> torch.Tensor:
    """The decodes' rows: gathered into one padded batch. Padding is masked: its zero weight meets finite memory.

    The heads of a KV group become rows of one query, so keys are not copied for each head (grouped-query attention).
    """
    batch, places, seen = meta.shape.decodes, meta.decode_places, meta.decode_seen
    keys, values = (_gather(cache, places.view(-1), batch) for cache in (key_cache, value_cache))
    if window is not None:
        seen = seen & (torch.arange(places.shape[1], device=q.device) >= meta.context_len[:batch, None] - window)
    rows = q.view(batch, keys.shape[1], -1, q.shape[-1])
    return sdpa(rows, keys, values, seen[:, None, None], scale=scale).reshape(q.shape)


def prefill(q, key_cache, value_cache, meta: StepMeta, scale: float, window: int | None = None) -> torch.Tensor:
    """The rows of longer chunks, one call a chunk: every token sees the request's tokens up to itself."""
    out, skip = torch.empty_like(q), meta.shape.decodes
    for (first, last, context), places in zip(meta.shape.long_chunks, meta.long_places, strict=True):
        keys, values = (_gather(cache, places, 1) for cache in (key_cache, value_cache))
        at, seen = meta.positions[first:last, None], torch.arange(context, device=q.device)
        mask = seen <= at
        if window is not None:
            mask &= seen > at - window
        rows = q[first - skip : last - skip].transpose(0, 1)[None]
        group = rows.shape[1] // keys.shape[1]
        if q.is_cuda and group > 1:  # with a mask, ``enable_gqa`` leaves a GPU nothing but the slow way, in fp32
            keys, values, group = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), 1
        attended = sdpa(rows, keys, values, mask, scale=scale, enable_gqa=group > 1)
        out[first - skip : last - skip] = attended[0].transpose(0, 1)
    return out


def _gather(cache: torch.Tensor, places: torch.Tensor, batch: int) -> torch.Tensor:
    """Tokens at ``places`` of a cache [blocks, block_size, Hkv, D] as [batch, Hkv, tokens, D]."""
    heads, dim = cache.shape[2:]
    return cache.view(-1, heads, dim).index_select(0, places).view(batch, -1, heads, dim).transpose(1, 2)


def torch_attention(
    q, k, v, key_cache, value_cache, meta: StepMeta, scale: float, window: int | None = None
) -> torch.Tensor:
    """The plain backend: write, gather, ``scaled_dot_product_attention``. q [T, Hq, D]; k, v [T, Hkv, D] -> [T, Hq, D].

    ``window``: a token sees this many tokens, itself included (sliding-window attention); None: all before it.
    """
    write(k, v, key_cache, value_cache, meta)
    out, n = torch.empty_like(q), meta.shape.decodes
    if n:
        out[:n] = decode(q[:n], key_cache, value_cache, meta, scale, window)
    if n < len(q):
        out[n:] = prefill(q[n:], key_cache, value_cache, meta, scale, window)
    return out
