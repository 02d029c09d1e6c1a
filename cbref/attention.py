"""Attention over a paged cache, for all chunks of a step at once.

``transformers`` calls ``paged_attention`` in every layer of a model whose attention implementation is ``NAME``. The
step's metadata travels in one private keyword, ``cb_meta``: nothing is global, and no name that ``transformers`` may
claim is used.

Shapes: T tokens in the step, Hq query heads, Hkv key heads (Hq a multiple of Hkv), D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface

from cbref.kv_cache import BlockPool
from cbref.request import Chunk

NAME = "cbref_paged"


@dataclass
class StepMeta:
    """Where a step's tokens stand and where their keys and values live.

    A *place* is ``block * block_size + offset``, an index into the cache seen as one row of tokens. The cache has one
    block more than the pool: it stays zero, and its first place, ``null``, stands for "no token" in padded tables.

    query_start [B + 1]  chunk i owns the packed rows query_start[i] : query_start[i + 1]
    context_len [B]      tokens of the request up to the end of its chunk
    places      [T]      where each token's key and value go
    block_table [B, N]   blocks of each request, padded with the null block
    """

    query_start: np.ndarray
    context_len: np.ndarray
    positions: torch.Tensor
    places: torch.Tensor
    block_table: torch.Tensor
    decode_rows: torch.Tensor  # packed rows of chunks of length one
    decode_places: torch.Tensor  # [decodes, longest context], padded with null
    decode_mask: torch.Tensor  # the same shape: which are tokens
    prefills: list[tuple[int, int, torch.Tensor]]  # first row, last row + 1, places of the whole context
    caches: list[tuple[torch.Tensor, torch.Tensor]]  # per layer, keys and values [num_blocks + 1, block_size, Hkv, D]
    attend: Callable  # the backend

    @classmethod
    def build(cls, chunks: list[Chunk], pool: BlockPool, caches, attend: Callable, device) -> StepMeta:
        size, null = pool.block_size, pool.num_blocks * pool.block_size
        start = np.array([c.start for c in chunks])
        context = np.array([c.stop for c in chunks])
        query_start = np.concatenate([[0], np.cumsum(context - start)])
        table = np.full((len(chunks), max(-(-int(context.max()) // size), 1)), pool.num_blocks)
        for i, c in enumerate(chunks):
            blocks = pool.table(c.request.id)[: table.shape[1]]
            table[i, : len(blocks)] = blocks
        places = (table[:, :, None] * size + np.arange(size)).reshape(
            len(chunks), -1
        )  # of every position of every request
        positions = np.concatenate([np.arange(c.start, c.stop) for c in chunks])
        owner = np.repeat(np.arange(len(chunks)), context - start)
        decodes = np.flatnonzero(context - start == 1)
        longest = int(context[decodes].max(initial=0))
        mask = np.arange(longest) < context[decodes, None]

        def tensor(array):
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

        prefills = [
            (int(query_start[i]), int(query_start[i + 1]), tensor(places[i, : context[i]]))
            for i in np.flatnonzero(context - start > 1)
        ]
        return cls(
            query_start,
            context,
            tensor(positions),
            tensor(places[owner, positions]),
            tensor(table),
            tensor(query_start[decodes]),
            tensor(np.where(mask, places[decodes, :longest], null)),
            tensor(mask),
            prefills,
            caches,
            attend,
        )


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


def torch_attention(
    q, k, v, key_cache, value_cache, meta: StepMeta, scale: float, window: int | None = None
) -> torch.Tensor:
    """The plain backend: write, gather, ``scaled_dot_product_attention``. q [T, Hq, D]; k, v [T, Hkv, D] -> [T, Hq, D].

    Chunks of length one are gathered into one padded batch. The heads of a KV group become rows of one query, so keys
    are not copied for each head (grouped-query attention). Padding reads the null block, never a neighbour's memory.
    ``window``: a token sees this many tokens, itself included (sliding-window attention); None: all before it.
    """
    heads, dim = k.shape[1:]
    group = q.shape[1] // heads
    key_rows, value_rows = key_cache.view(-1, heads, dim), value_cache.view(-1, heads, dim)
    key_rows.index_copy_(0, meta.places, k)
    value_rows.index_copy_(0, meta.places, v)
    out = torch.empty_like(q)

    batch, longest = meta.decode_places.shape
    if batch:
        flat = meta.decode_places.view(-1)
        keys = key_rows.index_select(0, flat).view(batch, longest, heads, dim).transpose(1, 2)
        values = value_rows.index_select(0, flat).view(batch, longest, heads, dim).transpose(1, 2)
        mask = meta.decode_mask
        if window is not None:
            mask = mask & (torch.arange(longest, device=q.device) > meta.positions[meta.decode_rows, None] - window)
        rows = q[meta.decode_rows].view(batch, heads, group, dim)
        out[meta.decode_rows] = sdpa(rows, keys, values, mask[:, None, None], scale=scale).reshape(batch, -1, dim)

    for first, last, places in meta.prefills:
        keys, values = (rows.index_select(0, places).transpose(0, 1) for rows in (key_rows, value_rows))
        at, seen = meta.positions[first:last, None], torch.arange(len(places), device=q.device)
        mask = seen <= at
        if window is not None:
            mask &= seen > at - window
        rows = q[first:last].transpose(0, 1)
        out[first:last] = sdpa(rows[None], keys[None], values[None], mask, scale=scale, enable_gqa=group > 1)[
            0
        ].transpose(0, 1)
    return out


BACKENDS = {"torch": torch_attention}
