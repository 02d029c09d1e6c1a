"""Put the keys and values of a step's tokens where they belong in the paged cache.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023), sections 4.3
and 5.1: a request's keys and values live in blocks that are anywhere in the cache. Seen as rows of [Hkv, D], the cache
is one long array, and a token's *place* in it is ``block * block_size + offset``:

    k [T, Hkv, D]         token 0      token 1      token 2      token 3
    places [T]                  6            7            2           -1  (nothing is written)

    key_cache             block 0           block 1           block 2           block 3
    block_size 3          [ 0 | 1 | 2 ]     [ 3 | 4 | 5 ]     [ 6 | 7 | 8 ]     [ 9 | 10 | 11 ]
                                    ^                           ^   ^
                                    token 2               token 0   token 1

The kernel is a scatter, memory in and memory out, with no arithmetic: the bits arrive as they are. Program (t, i)
copies tile i of token t, HEADS heads of keys and the same heads of values. A negative place stands for "no token": CUDA
graphs replay a fixed number of tokens, and those that only fill up must not write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cbref_kernels.common import DTYPES


@triton.jit
def _kv_write_kernel(
    k_ptr, v_ptr, key_cache_ptr, value_cache_ptr, places_ptr, k_stride, k_head_stride, v_stride, v_head_stride, heads,
    DIM: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + token)  # 64 bits: the cache may have more than 2**31 elements
    if place >= 0:
        head = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
        column = tl.arange(0, COLUMNS)[None, :]
        mask = (head < heads) & (column < DIM)
        keys = tl.load(k_ptr + token * k_stride + head * k_head_stride + column, mask=mask)
        values = tl.load(v_ptr + token * v_stride + head * v_head_stride + column, mask=mask)
        target = place * heads * DIM + head * DIM + column  # both caches are contiguous and have the same shape
        tl.store(key_cache_ptr + target, keys, mask=mask)
        tl.store(value_cache_ptr + target, values, mask=mask)


def _launch(heads: int, dim: int) -> dict:
    """Tiles of up to 2048 numbers, and a warp for every 512 of them: 16 keys and 16 values a thread."""
    columns = triton.next_power_of_2(dim)
    rows = min(triton.next_power_of_2(heads), max(2048 // columns, 1))
    return {"DIM": dim, "HEADS": rows, "COLUMNS": columns, "num_warps": max(rows * columns // 512, 1)}


def kv_write(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, places: torch.Tensor
) -> None:
    """Write ``k`` and ``v`` [T, Hkv, D] into the caches [blocks, block_size, Hkv, D] at ``places`` [T], int64.

    Nothing is written for a negative place. The host does not see the places, so nobody checks that they are inside
    the cache; of two tokens with the same place, either may win. ``ValueError`` for shapes, dtypes or strides that do
    not fit.
    """
    tokens, heads, dim = k.shape
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)} and k {tuple(k.shape)}: give them the same")
    if places.shape != (tokens,) or places.dtype != torch.int64:
        raise ValueError(f"places is {places.dtype} {tuple(places.shape)}: give int64, one for each of {tokens} tokens")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.shape[2:] != (heads, dim) or cache.shape != key_cache.shape:
            raise ValueError(f"{name} has shape {tuple(cache.shape)}: give both [blocks, block_size, {heads}, {dim}]")
        if not cache.is_contiguous():
            raise ValueError(f"{name} has strides {cache.stride()}: allocate it contiguously, a copy would be lost")
    for name, tensor in (("k", k), ("v", v), ("key_cache", key_cache), ("value_cache", value_cache)):
        if tensor.dtype not in DTYPES or tensor.dtype != k.dtype:
            raise ValueError(f"{name} is {tensor.dtype} and k {k.dtype}: give all in float16, bfloat16 or float32")
        if tensor.stride(-1) != 1 and dim > 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, not 1: call .contiguous()")
    if k.numel():
        launch = _launch(heads, dim)
        _kv_write_kernel[(tokens, triton.cdiv(heads, launch["HEADS"]))](
            k, v, key_cache, value_cache, places, k.stride(0), k.stride(1), v.stride(0), v.stride(1), heads, **launch
        )


def kv_write_torch(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, places: torch.Tensor
) -> None:
    """The same in plain torch."""
    block_size = key_cache.shape[1]
    for token, place in enumerate(places.tolist()):
        if place >= 0:
            block, offset = divmod(place, block_size)
            key_cache[block, offset] = k[token]
            value_cache[block, offset] = v[token]
