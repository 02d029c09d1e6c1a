"""Attention of a mixed step in one launch: chunks of prompts and single decodes side by side.

A decode is a chunk of length one. So one kernel can serve a whole step, if it finds by itself which request a program
works for, and if all keys and values, the step's own included, are in the paged cache before (``kv_write``).

1. A tile of the rows of one KV head. The query heads that share it (grouped-query attention) and BLOCK_Q tokens that
   follow each other fill the tile; all rows use the same tile of keys. With a group of 3, padded to 4:

       row  0 1 2 3   4 5 6 7   8 9 ...         row = token * HEADS + head, HEADS = 4
            a b c .   a b c .   a b ...         a, b, c: heads of the group;  . : padding, zeros that nobody reads
            token 0   token 1   token 2

2. Which request? Requests cut into tiles of BLOCK_Q tokens make an unknown number of tiles, which the host could only
   learn by waiting for the GPU. But if request i begins at slot ``query_start[i] // BLOCK_Q + i``, it does not overlap
   its neighbour (the + i makes room for its last, partial tile). So T // BLOCK_Q + B slots are always enough:

       chunks of 5, 1 and 3 tokens, BLOCK_Q = 4:   query_start = 0 5 6 9,   first slots 0, 1 + 1, 1 + 2

       slot      0      1      2      3      4                  9 // 4 + 3 = 5 slots
       request   0      0      1      2      2
       tokens    0-3    4      5      6-8    none: returns at once

   A program searches ``query_start`` by bisection for the last request whose first slot is not beyond its own.

3. It walks over the positions 0 to that of its last token, tile by tile through the block table, with the online
   softmax as in ``prefill_attention``; a token sees the positions up to its own.

One launch and no sorting of requests into two kinds: simple for the host, and decodes run beside chunks on the same
multiprocessor, so that the ones use the memory while the others use the tensor cores. The price is paid by the decodes:
of a tile's rows a decode fills only one group, the rest is computed and thrown away, and a long past is walked by one
program where ``decode_attention`` splits it. The fresh keys, too, take the way through the block table. So two launches
win with few, long decodes; one wins where steps are small and launches cost as much as the work.

The packing of rows and the search follow vLLM's unified attention kernel. POD-Attention (Kamath et al., ASPLOS 2025)
makes chunks and decodes share a multiprocessor on purpose, with tiles of different sizes for the two.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from cbref_kernels.common import capability, check_heads


@triton.jit
def _request_of(query_start, slot, requests, BLOCK_Q: tl.constexpr):
    """The last request whose first slot is not beyond ``slot``."""
    low, high = 0, requests  # it is in low .. high - 1
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(query_start + middle) // BLOCK_Q + middle <= slot
        low, high = tl.where(begins, middle, low), tl.where(begins, high, middle)
    return low


# One compilation serves every step: the metadata are slices, at whatever address, and tables have many widths.
@triton.jit(
    do_not_specialize=["requests", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "context_len", "query_start"],
)
def _mixed_kernel(
    q, key_cache, value_cache, block_table, context_len, query_start, out,  # pointers
    q_token_stride, q_head_stride, table_stride, requests, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # KV heads vary fastest: programs that start together read neighbouring memory, for a token's heads lie in a row.
    slot, key_head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    request = _request_of(query_start, slot, requests, BLOCK_Q)
    chunk = tl.load(query_start + request)  # the packed row of the chunk's first token
    length = tl.load(query_start + request + 1) - chunk
    first_query = (slot - chunk // BLOCK_Q - request) * BLOCK_Q
    if first_query >= length:  # a slot that no tile needs
        return
    start = tl.load(context_len + request) - length

    rows, columns, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, PADDED_D)[None, :]
    asking = first_query + rows // HEADS  # queries, counted from the chunk's first token
    head = (key_head * GROUP + rows % HEADS).to(tl.int64)  # 64 bits: tensors may have more than 2**31 numbers
    packed = (chunk + asking).to(tl.int64)
    query_mask = ((asking < length) & (rows % HEADS < GROUP))[:, None] & (dims < D)
    query_offset = packed * q_token_stride + head * q_head_stride
    queries = tl.load(q + query_offset[:, None] + dims, mask=query_mask, other=0.0)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, PADDED_D], tl.float32)
    end = start + tl.minimum(first_query + BLOCK_Q, length)  # after the position of the tile's last token
    for first_key in range(0, end, BLOCK_N):
        position = first_key + columns
        block = tl.load(block_table + request * table_stride + position // BLOCK_SIZE, mask=position < end, other=0)
        place = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        offset = (place * KEY_HEADS + key_head)[:, None] * D + dims
        # Zeros, not what the memory holds: it may hold NaN, and 0 * NaN is NaN.
        mask = (position < end)[:, None] & (dims < D)
        keys = tl.load(key_cache + offset, mask=mask, other=0.0)
        values = tl.load(value_cache + offset, mask=mask, other=0.0)

        logits = tl.dot(queries, keys.T, input_precision=PRECISION) * scale
        seen = position[None, :] <= start + asking[:, None]
        logits = tl.where(seen, logits, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1))  # finite: all rows see position 0, in the first tile
        weights = tl.exp2(logits - new_largest[:, None])
        rescale = tl.exp2(largest - new_largest)
        total = total * rescale + tl.sum(weights, 1)
        result = tl.dot(weights.to(values.dtype), values, result * rescale[:, None], input_precision=PRECISION)
        largest = new_largest

    out_offset = (packed * KEY_HEADS * GROUP + head) * D
    tl.store(out + out_offset[:, None] + dims, result / total[:, None], mask=query_mask)


def launch_configuration(dim: int, dtype: torch.dtype, compute: tuple[int, int]) -> dict:
    """Tile sizes, arithmetic of fp32, warps and pipeline stages, such that no register spills."""
    padded = triton.next_power_of_2(dim)
    precision = "ieee"  # of fp32 products: the ordinary multiply-add. It does not matter to fp16 and bf16
    if compute < (8, 0):  # no tensor cores for Triton here: correct, but slow
        m, n, warps, stages = 16, 16, 4 if padded == 64 else 8, 1
    elif dtype == torch.float32 and padded == 256:
        m, n, warps, stages = 16, 16, 4, 1
    elif dtype == torch.float32:
        # Tensor cores: three products of TensorFloat-32 parts, which is nearly exact. The parts need registers, hence
        # the small tiles; those of 256 dimensions find no room.
        precision = "tf32x3"
        m, n, warps, stages = (32, 16, 4, 2) if padded == 64 else (16, 16, 8, 2)
    else:
        m, n, warps, stages = 64, 64 if padded <= 128 else 32, 4 if padded <= 128 else 8, 2
        if padded > 64 and compute < (9, 0):  # there, tensor cores take keys from registers only: half the tile
            n //= 2
    return {"BLOCK_M": m, "BLOCK_N": n, "PRECISION": precision, "num_warps": warps, "num_stages": stages}


def mixed_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a step's chunks, of any lengths, over the paged cache -> [T, Hq, D].

    q            [T, Hq, D]                    float16, bfloat16 or float32; any strides in the first two dimensions
    caches       [blocks, block_size, Hkv, D]  contiguous, of q's dtype; the step's keys and values are in them already
    block_table  [B, N] int32                  blocks of each request; entries beyond its context are not read
    context_len  [B] int32                     tokens of each request up to the end of its chunk
    query_start  [B + 1] int32                 chunk i owns the packed rows query_start[i] : query_start[i + 1]
    scale                                      factor on the logits, mostly D ** -0.5
    out          [T, Hq, D]                    contiguous; rows of no chunk are left alone; None: a new tensor

    ``ValueError`` for what the kernel cannot take. Nothing is read back from the GPU, so CUDA graphs can record it; the
    values in ``block_table``, ``context_len`` and ``query_start`` are therefore not checked.
    """
    tokens, query_heads, dim = q.shape
    block_size, key_heads = key_cache.shape[1:3]
    group = check_heads(query_heads, key_heads, dim, q.dtype)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _check(q, key_cache, value_cache, block_table, context_len, query_start, out)
    requests = len(context_len)
    if requests == 0 or tokens == 0:
        return out
    configuration = launch_configuration(dim, q.dtype, capability(q.device))
    heads = triton.next_power_of_2(group)
    slots = tokens // (configuration["BLOCK_M"] // heads) + requests
    _mixed_kernel[(slots * key_heads,)](
        q, key_cache, value_cache, block_table, context_len, query_start, out,
        q.stride(0), q.stride(1), block_table.stride(0), requests, scale * math.log2(math.e),
        KEY_HEADS=key_heads, GROUP=group, HEADS=heads, D=dim, PADDED_D=triton.next_power_of_2(dim),
        BLOCK_SIZE=block_size, **configuration,
    )  # fmt: skip
    return out


def _check(q, key_cache, value_cache, block_table, context_len, query_start, out) -> None:
    """``ValueError`` for shapes, dtypes and layouts that would make the kernel read or write the wrong memory."""
    requests, cached = len(context_len), key_cache.shape[:3] + q.shape[2:]
    for name, tensor, shape, dtype in (
        ("key_cache", key_cache, cached, q.dtype), ("value_cache", value_cache, cached, q.dtype),
        ("out", out, q.shape, q.dtype), ("context_len", context_len, (requests,), torch.int32),
        ("query_start", query_start, (requests + 1,), torch.int32),
        ("block_table", block_table, (requests, block_table.shape[-1]), torch.int32),
    ):  # fmt: skip
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} of {tensor.dtype}; with q {tuple(q.shape)} of {q.dtype} and "
                f"{requests} requests it must be {tuple(shape)} of {dtype}: reshape or convert it"
            )
        if name != "block_table" and not tensor.is_contiguous():
            raise ValueError(f"{name}'s strides are {tensor.stride()}; it must be contiguous: allocate it so")
    for name, tensor in (("q", q), ("block_table", block_table)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}'s last stride is {tensor.stride(-1)}, it must be 1: call .contiguous()")


def mixed_attention_torch(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    query_start: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, chunk by chunk, in fp32."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    block_size, group = key_cache.shape[1], q.shape[1] // key_cache.shape[2]
    bounds = query_start.tolist()
    for i, context in enumerate(context_len.tolist()):
        chunk = slice(bounds[i], bounds[i + 1])
        position = torch.arange(context, device=q.device)
        asking = position[context - len(q[chunk]) :]
        block, offset = block_table[i, position // block_size], position % block_size
        keys = key_cache[block, offset].float().repeat_interleave(group, dim=1)
        values = value_cache[block, offset].float().repeat_interleave(group, dim=1)
        logits = torch.einsum("qhd,khd->hqk", q[chunk].float(), keys) * scale
        logits = logits.masked_fill(position > asking[:, None], float("-inf"))
        out[chunk] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values).to(out.dtype)
    return out
