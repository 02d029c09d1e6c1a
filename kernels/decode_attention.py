"""Decode attention: one new token of each request looks at its whole past in the paged cache.

A decode step reads every key and value of every past once, and uses each number in one multiply-add per query head: it
is bound by memory, so the kernel's one aim is to keep the memory busy and to load nothing twice. Three ideas:

1. Grouped heads share a load (grouped-query attention). The ``group`` query heads of one KV head become the rows of
   one tile. The tensor cores want 16 rows, so the tile has 16, and those past ``group`` are zeros nobody reads:

       queries [16, D]     head 0 of the group  q q q q q q        keys [TILE, D]: loaded once, used by all rows
                           head 1               q q q q q q
                           padding              0 0 0 0 0 0  ...

2. The past is cut into splits (Flash-Decoding: Dao, Haziza, Massa and Sizov, 2023). Four requests on eight KV heads
   are 32 programs: on a GPU of 132 multiprocessors most would idle. So several programs share one past, each takes a
   contiguous range of whole tiles, and a second, small kernel joins what they found:

       past of a request   |tile|tile|tile|tile|tile|tile|ti|        context_len = 6.5 tiles, 3 splits
       programs            |--- split 0 --|--- split 1 --|sp|        each -> output [D] and log-sum-exp, in fp32
       second kernel       output = sum of outputs, weighted by exp(log-sum-exp)

   A split's range is computed from the request's own ``context_len``: in a mixed batch a short request has short
   splits. A split without tokens writes nothing, and the second kernel does not read it.

3. Pages (PagedAttention: Kwon et al., 2023, section 4.3). Token ``t`` stands in block ``block_table[request, t //
   block_size]`` at offset ``t % block_size``. A tile's tokens are looked up one by one, so blocks of any size do:

       block_table[request]   7 2 9 .        (beyond the context: not read)
       caches                 [blocks, block_size, Hkv, D]: a token's vector of one KV head is D contiguous numbers

Inside a split runs the online softmax (Milakov and Gimelshein, 2018; FlashAttention: Dao et al., 2022, section 3.1): a
running maximum and a running sum, both rescaled when a tile brings a larger maximum. Powers of two replace those of e,
as the hardware has exp2: the factor log2(e) goes into ``scale``, and log-sum-exps are in base two.

Shapes: B requests, Hq query heads, Hkv KV heads, D head dimension, group = Hq // Hkv, N blocks in the widest table.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from cbref_kernels.common import capability, check_heads

MAX_SPLITS = 64  # the second kernel holds all of a head's partial outputs at once
SPLIT_TOKENS = 256  # a split of less spends its time on starting up


@triton.jit
def _split_range(context, split, splits, TILE: tl.constexpr):
    """First token of a split and the one after its last. Whole tiles; the last splits may be short or empty."""
    length = tl.cdiv(tl.cdiv(context, TILE), splits) * TILE
    return split * length, tl.minimum(split * length + length, context)


# One compilation serves every step: the metadata are slices, at whatever address, and tables have many widths.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_table", "context_len"])
def _attend_kernel(
    q, key_cache, value_cache, block_table, context_len, out, partial_out, partial_lse,  # pointers
    table_stride, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # KV heads vary fastest: programs that start together read neighbouring memory, for a token's heads lie in a row.
    key_head, split, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_heads, splits = tl.num_programs(0), tl.num_programs(1)
    context = tl.load(context_len + request)
    begin, end = _split_range(context, split, splits, TILE)

    rows, dims, tokens = tl.arange(0, ROWS), tl.arange(0, PADDED_D), tl.arange(0, TILE)
    heads = (request * key_heads + key_head) * GROUP + rows  # row in [B * Hq, D]
    head_mask = (rows < GROUP)[:, None] & (dims < D)[None, :]
    queries = tl.load(q + heads[:, None] * D + dims[None, :], mask=head_mask, other=0.0)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED_D], tl.float32)
    for first in range(begin, end, TILE):
        position = first + tokens
        seen = position < end  # at least one is, so `largest` is finite after the first tile
        block = tl.load(block_table + request * table_stride + position // BLOCK_SIZE, mask=seen, other=0)
        place = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE  # 64 bits: caches exceed 2**31 numbers
        offset = (place * key_heads + key_head)[:, None] * D + dims[None, :]
        # Zeros, not what the memory holds: it may hold NaN, and 0 * NaN is NaN.
        mask = seen[:, None] & (dims < D)[None, :]
        keys = tl.load(key_cache + offset, mask=mask, other=0.0)
        values = tl.load(value_cache + offset, mask=mask, other=0.0)

        scores = tl.dot(queries, keys.T, input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        rescale = tl.exp2(largest - new_largest)
        total = total * rescale + tl.sum(weights, 1)
        result = tl.dot(weights.to(values.dtype), values, result * rescale[:, None], input_precision=PRECISION)
        largest = new_largest

    result = result / tl.where(total == 0, 1.0, total)[:, None]  # zeros for a padded request, whose context is 0
    if splits == 1:
        tl.store(out + heads[:, None] * D + dims[None, :], result, mask=head_mask)
    elif begin < end:
        part = heads * splits + split  # row in [B * Hq * splits, D]
        tl.store(partial_out + part[:, None] * D + dims[None, :], result, mask=head_mask)
        tl.store(partial_lse + part, largest + tl.log2(total), mask=rows < GROUP)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["context_len"])
def _join_kernel(
    partial_out, partial_lse, context_len, out,  # pointers
    query_heads, splits,
    D: tl.constexpr, PADDED_D: tl.constexpr, PADDED_SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)  # row in [B * Hq, D]
    split, dims = tl.arange(0, PADDED_SPLITS), tl.arange(0, PADDED_D)
    begin, end = _split_range(tl.load(context_len + head // query_heads), split, splits, TILE)
    written = begin < end
    part = head * splits + split
    lse = tl.load(partial_lse + part, mask=written, other=-1e30)  # finite, as -inf - -inf is NaN
    mask = written[:, None] & (dims < D)[None, :]
    outs = tl.load(partial_out + part[:, None] * D + dims[None, :], mask=mask, other=0.0)
    weights = tl.where(written, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(weights[:, None] * outs, 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + head * D + dims, result, mask=dims < D)


def launch_configuration(dim: int, dtype: torch.dtype, compute: tuple[int, int], group: int) -> dict:
    """Rows for a group's heads, tokens in a tile, warps and pipeline stages, such that no register spills."""
    padded = triton.next_power_of_2(dim)
    if compute < (8, 0):  # no tensor cores for Triton here, so padding rows would only cost time
        rows = triton.next_power_of_2(group)
        return {"ROWS": rows, "TILE": 32 if padded <= 128 else 16, "num_warps": 4, "num_stages": 1}
    # A tile of keys is 16 KiB and one of values too. With five stages each is there twice: while one is computed with,
    # the next is on its way into shared memory (cp.async). Of five stages Triton gives half to the look-up of blocks.
    tile = 16384 // (padded * dtype.itemsize)
    warps = 8 if padded * dtype.itemsize >= 1024 else 4  # fp32 of D = 256 needs twice the registers
    return {"ROWS": 16, "TILE": tile, "num_warps": warps, "num_stages": 5}


def choose_splits(programs: int, longest: int, multiprocessors: int) -> int:
    """A power of two: enough splits for four programs on each multiprocessor, none of less than ``SPLIT_TOKENS``.

    ``programs``: B * Hkv; ``longest``: an upper bound for the contexts, in tokens.
    """
    splits = 1
    while splits < MAX_SPLITS and programs * splits < 4 * multiprocessors and longest >= 2 * splits * SPLIT_TOKENS:
        splits *= 2
    return splits


def decode_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
    splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query a request over its paged past, which includes the query's own token -> [B, Hq, D].

    q            [B, Hq, D]       float16, bfloat16 or float32
    caches       [blocks, block_size, Hkv, D], contiguous, of q's dtype; this step's keys and values are in them already
    block_table  [B, N] int32     blocks of each request; entries beyond its context are not read
    context_len  [B] int32        tokens of each request, at most N * block_size; 0 gives a row of zeros
    scale        factor on the scores, mostly D ** -0.5
    splits       1 to 64 programs share one past; None: ``choose_splits``, which looks at B. At a fixed number a
                 request's result is bitwise the same whatever the rest of the batch
    out          [B, Hq, D]       contiguous, written and returned; None: a new tensor

    ``ValueError`` for what the kernel cannot take. Nothing is read back from the GPU, so CUDA graphs can record it; the
    values in ``block_table`` and ``context_len`` are therefore not checked.
    """
    batch, query_heads, dim = q.shape
    block_size, key_heads = key_cache.shape[1:3]
    group = check_heads(query_heads, key_heads, dim, q.dtype)
    _check(q, key_cache, value_cache, block_table, context_len, out)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if splits is None:
        cuda = q.device.type == "cuda"
        multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count if cuda else 108
        splits = choose_splits(batch * key_heads, block_table.shape[1] * block_size, multiprocessors)
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits is {splits}; the kernel takes 1 to {MAX_SPLITS}: pass None to have it chosen")
    if batch == 0:
        return out

    compute = capability(q.device)
    configuration = launch_configuration(dim, q.dtype, compute, group)
    padded_dim = triton.next_power_of_2(dim)
    # fp32 on tensor cores: three products of TensorFloat-32 parts, which is nearly exact (before sm_80 there are none).
    precision = "tf32x3" if q.dtype == torch.float32 and compute >= (8, 0) else "ieee"
    parts = batch * query_heads * splits if splits > 1 else 0
    partial_out = torch.empty((parts, dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(parts, dtype=torch.float32, device=q.device)
    _attend_kernel[(key_heads, splits, batch)](
        q.contiguous(), key_cache, value_cache, block_table, context_len, out, partial_out, partial_lse,
        block_table.stride(0), scale * math.log2(math.e),
        GROUP=group, D=dim, PADDED_D=padded_dim, BLOCK_SIZE=block_size, PRECISION=precision, **configuration,
    )  # fmt: skip
    if splits > 1:
        padded_splits = triton.next_power_of_2(splits)
        _join_kernel[(batch * query_heads,)](
            partial_out, partial_lse, context_len, out, query_heads, splits,
            D=dim, PADDED_D=padded_dim, PADDED_SPLITS=padded_splits, TILE=configuration["TILE"],
            num_warps=min(8, max(1, padded_splits * padded_dim // 1024)),
        )  # fmt: skip
    return out


def _check(q, key_cache, value_cache, block_table, context_len, out) -> None:
    """``ValueError`` for shapes, dtypes and layouts that would make the kernel read or write the wrong memory."""
    batch, _, dim = q.shape
    expected = (*key_cache.shape[:3], dim)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.shape != expected or cache.dtype != q.dtype or not cache.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(cache.shape)} of {cache.dtype} with strides {cache.stride()}; it must be {expected} "
                f"of q's {q.dtype}, contiguous: allocate it as [blocks, block_size, KV heads, D]"
            )
    if batch > 65535:
        raise ValueError(f"{batch} requests; a launch takes 65535: split the batch")
    if block_table.ndim != 2 or len(block_table) != batch or block_table.stride(1) != 1:
        raise ValueError(
            f"block_table is {tuple(block_table.shape)} with strides {block_table.stride()}; it must be one row of "
            f"contiguous block ids for each of {batch} requests: slice or pad it"
        )
    if context_len.shape != (batch,) or not context_len.is_contiguous():
        raise ValueError(
            f"context_len is {tuple(context_len.shape)}; it must be ({batch},), contiguous: one number a request"
        )
    for name, metadata in (("block_table", block_table), ("context_len", context_len)):
        if metadata.dtype != torch.int32:
            raise ValueError(f"{name} is {metadata.dtype}; the kernel reads int32: convert it with .int()")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous()):
        raise ValueError(
            f"out is {tuple(out.shape)} of {out.dtype} with strides {out.stride()}; it must be {tuple(q.shape)} of q's "
            f"{q.dtype}, contiguous: pass None to have it made"
        )


def decode_attention_torch(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
    splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, request by request, in fp32. ``splits`` changes nothing here."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    block_size, key_heads, dim = key_cache.shape[1:]
    for i, context in enumerate(context_len.tolist()):
        position = torch.arange(context, device=q.device)
        block, offset = block_table[i, position // block_size], position % block_size
        keys, values = key_cache[block, offset].float(), value_cache[block, offset].float()  # [context, Hkv, D]
        queries = q[i].float().view(key_heads, -1, dim)  # query head h reads KV head h // group
        scores = torch.einsum("hgd,chd->hgc", queries, keys) * scale
        out[i] = torch.einsum("hgc,chd->hgd", scores.softmax(-1), values).reshape(-1, dim)
    return out
