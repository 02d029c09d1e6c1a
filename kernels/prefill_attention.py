"""Attention of a prompt's chunk: many queries, over the request's past in the paged cache and over the chunk itself.

A step packs chunks of several requests into one row of tokens. A chunk's keys come from two places:

    request i, context_len = 11, chunk of 4:   start = 11 - 4 = 7

    position          0 1 2 3 | 4 5 6 | 7 8 9 10
    where its K, V    block 5 | block 2   packed k, v          block_table[i] = 5, 2, ...   (block_size 4)
    are               `-- key_cache --'   rows query_start[i] + 0 .. 3

                      past              fresh
                      0 . . . . . 6     7 8 9 10
    query 7           x x x x x x x     x                      A new token sees all of the past: no mask is needed.
    query 8           x x x x x x x     x x                    Among the fresh tokens it sees itself and those
    query 9           x x x x x x x     x x x                  before it: the causal mask.
    query 10          x x x x x x x     x x x x

The fresh keys are in hand already, contiguous, so the kernel reads them there and not through the block table.

One program computes a tile of BLOCK_M queries of one head. It walks over the keys in tiles of BLOCK_N and never holds
more than one tile of logits: the *online softmax* (Milakov and Gimelshein, 2018) in the loop order of FlashAttention-2
(Dao, 2024, section 3.1). For each query it carries the largest logit so far, the sum of exp(logit - largest) and the
sum of exp(logit - largest) * value; when a larger logit turns up, both sums are rescaled. Exponentials are powers of
two, since that is the GPU's instruction: exp(x) = exp2(x * log2(e)), with log2(e) folded into the scale.

The query heads of a group share one KV head, and here each reads it on its own. A tile has enough queries to keep the
tensor cores busy without its neighbours, and what the first head fetched, the others find in the L2 cache.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from cbref_kernels.common import capability, check_heads


@triton.jit
def _absorb(queries, keys, values, seen, largest, total, result, scale, PRECISION: tl.constexpr):
    """One step of the online softmax: add a tile of keys and values to what the queries have gathered so far."""
    logits = tl.dot(queries, keys.T, input_precision=PRECISION) * scale
    logits = tl.where(seen, logits, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(logits, 1))  # finite: every query sees a key of the first tile it meets
    weights = tl.exp2(logits - new_largest[:, None])
    rescale = tl.exp2(largest - new_largest)
    total = total * rescale + tl.sum(weights, 1)
    result = tl.dot(weights.to(values.dtype), values, result * rescale[:, None], input_precision=PRECISION)
    return new_largest, total, result


# One compilation serves every step: the metadata are slices, at whatever address, and tables have many widths.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_table", "context_len", "query_start"],
)
def _prefill_kernel(
    q, k, v, key_cache, value_cache, block_table, context_len, query_start, out,  # pointers
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, table_stride, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, request, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunk = tl.load(query_start + request)  # the packed row of the chunk's first token
    length = tl.load(query_start + request + 1) - chunk
    first_query = tile * BLOCK_M
    if first_query >= length:  # the grid fits the step's longest chunk, and this one is shorter
        return
    start = tl.load(context_len + request) - length
    key_head = head // GROUP

    rows, columns, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, PADDED_D)[None, :]
    asking = first_query + rows  # queries, counted from the chunk's first token
    packed = (chunk + asking).to(tl.int64)[:, None]  # 64 bits, as for heads: tensors may have more than 2**31 numbers
    query_mask = (asking < length)[:, None] & (dims < D)
    queries = tl.load(q + packed * q_token_stride + head * q_head_stride + dims, mask=query_mask, other=0.0)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, PADDED_D], tl.float32)

    for first_key in range(0, start, BLOCK_N):
        position = first_key + columns
        seen = position < start
        block = tl.load(block_table + request * table_stride + position // BLOCK_SIZE, mask=seen, other=0)
        place = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        offset = (place * KEY_HEADS + key_head)[:, None] * D + dims
        # Zeros, not what the memory holds: it may hold NaN, and 0 * NaN is NaN.
        mask = seen[:, None] & (dims < D)
        keys = tl.load(key_cache + offset, mask=mask, other=0.0)
        values = tl.load(value_cache + offset, mask=mask, other=0.0)
        largest, total, result = _absorb(queries, keys, values, seen[None, :], largest, total, result, scale, PRECISION)

    for first_key in range(0, tl.minimum(first_query + BLOCK_M, length), BLOCK_N):
        fresh = first_key + columns  # keys, counted from the chunk's first token like the queries
        row = (chunk + fresh).to(tl.int64)[:, None]
        mask = (fresh < length)[:, None] & (dims < D)
        keys = tl.load(k + row * k_token_stride + key_head * k_head_stride + dims, mask=mask, other=0.0)
        values = tl.load(v + row * v_token_stride + key_head * v_head_stride + dims, mask=mask, other=0.0)
        seen = fresh[None, :] <= asking[:, None]
        largest, total, result = _absorb(queries, keys, values, seen, largest, total, result, scale, PRECISION)

    tl.store(out + (packed * KEY_HEADS * GROUP + head) * D + dims, result / total[:, None], mask=query_mask)


def launch_configuration(dim: int, dtype: torch.dtype, compute: tuple[int, int]) -> dict:
    """Tile sizes, arithmetic of fp32, warps and pipeline stages, such that no register spills."""
    padded = triton.next_power_of_2(dim)
    precision = "ieee"  # of fp32 products: the ordinary multiply-add. It does not matter to fp16 and bf16
    if compute < (8, 0):  # no tensor cores for Triton here: correct, but slow
        m, n, warps, stages = 16, 16, 4 if padded == 64 else 8, 1
    elif dtype == torch.float32 and padded == 256:
        m, n, warps, stages = 16, 32, 8, 1
    elif dtype == torch.float32:
        # Tensor cores: three products of TensorFloat-32 parts, which is nearly exact. The parts need registers, hence
        # the small tiles; those of 256 dimensions find no room.
        precision = "tf32x3"
        m, n, warps, stages = (32, 16, 2, 2) if padded == 64 else (16, 16, 4, 2)
    elif padded == 256:
        m, n, warps, stages = 64, 32, 8, 2
    elif padded == 64 or compute >= (9, 0):
        m, n, warps, stages = 128, 64, 8, 2
    else:  # before sm_90, tensor cores take keys from registers only: half the tile
        m, n, warps, stages = 128, 32, 8, 2
    return {"BLOCK_M": m, "BLOCK_N": n, "PRECISION": precision, "num_warps": warps, "num_stages": stages}


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    query_start: torch.Tensor,
    longest: int,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a step's chunks over their requests' pasts and over themselves -> [T, Hq, D].

    q            [T, Hq, D]                    float16, bfloat16 or float32; any strides in the first two dimensions
    k, v         [T, Hkv, D]                   the chunks' own keys and values, likewise
    caches       [blocks, block_size, Hkv, D]  contiguous, of q's dtype; only positions before the chunk are read
    block_table  [B, N] int32                  blocks of each request; entries beyond its past are not read
    context_len  [B] int32                     tokens of each request up to the end of its chunk
    query_start  [B + 1] int32                 chunk i owns the packed rows query_start[i] : query_start[i + 1]
    longest                                    tokens in the longest chunk; sizes the grid. Too large costs idle
                                               programs; too small leaves the ends of longer chunks unwritten
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
    _check(q, k, v, key_cache, value_cache, block_table, context_len, query_start, longest, out)
    requests = len(context_len)
    if requests == 0 or tokens == 0:
        return out
    configuration = launch_configuration(dim, q.dtype, capability(q.device))
    _prefill_kernel[(triton.cdiv(longest, configuration["BLOCK_M"]), requests, query_heads)](
        q, k, v, key_cache, value_cache, block_table, context_len, query_start, out,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), block_table.stride(0),
        scale * math.log2(math.e),
        KEY_HEADS=key_heads, GROUP=group, D=dim, PADDED_D=triton.next_power_of_2(dim), BLOCK_SIZE=block_size,
        **configuration,
    )  # fmt: skip
    return out


def _check(q, k, v, key_cache, value_cache, block_table, context_len, query_start, longest, out) -> None:
    """``ValueError`` for shapes, dtypes and layouts that would make the kernel read or write the wrong memory."""
    requests, fresh, cached = len(context_len), (len(q), *key_cache.shape[2:]), key_cache.shape[:3] + q.shape[2:]
    for name, tensor, shape, dtype in (
        ("k", k, fresh, q.dtype), ("v", v, fresh, q.dtype), ("out", out, q.shape, q.dtype),
        ("key_cache", key_cache, cached, q.dtype), ("value_cache", value_cache, cached, q.dtype),
        ("block_table", block_table, (requests, block_table.shape[-1]), torch.int32),
        ("context_len", context_len, (requests,), torch.int32),
        ("query_start", query_start, (requests + 1,), torch.int32),
    ):  # fmt: skip
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} of {tensor.dtype}; with q {tuple(q.shape)} of {q.dtype} and "
                f"{requests} requests it must be {tuple(shape)} of {dtype}: reshape or convert it"
            )
    for name, tensor in (("q", q), ("k", k), ("v", v), ("block_table", block_table)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}'s last stride is {tensor.stride(-1)}, it must be 1: call .contiguous()")
    for name, tensor in (
        ("key_cache", key_cache), ("value_cache", value_cache), ("out", out),
        ("context_len", context_len), ("query_start", query_start),
    ):  # fmt: skip
        if not tensor.is_contiguous():
            raise ValueError(f"{name}'s strides are {tensor.stride()}; it must be contiguous: allocate it so")
    if requests > 65535:
        raise ValueError(f"{requests} requests; a launch takes 65535: split the step")
    if longest < 1 <= len(q):
        raise ValueError(f"longest is {longest}; it must be at least 1: pass the tokens of the longest chunk")


def prefill_attention_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    query_start: torch.Tensor,
    longest: int,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, chunk by chunk, in fp32. ``longest`` changes nothing here."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    block_size, group = key_cache.shape[1], q.shape[1] // k.shape[1]
    bounds = query_start.tolist()
    for i, context in enumerate(context_len.tolist()):
        chunk = slice(bounds[i], bounds[i + 1])
        position = torch.arange(context, device=q.device)
        past, asking = position[: context - len(q[chunk])], position[context - len(q[chunk]) :]
        block, offset = block_table[i, past // block_size], past % block_size
        keys = torch.cat([key_cache[block, offset], k[chunk]]).float().repeat_interleave(group, dim=1)
        values = torch.cat([value_cache[block, offset], v[chunk]]).float().repeat_interleave(group, dim=1)
        logits = torch.einsum("qhd,khd->hqk", q[chunk].float(), keys) * scale
        logits = logits.masked_fill(position > asking[:, None], float("-inf"))
        out[chunk] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values).to(out.dtype)
    return out
