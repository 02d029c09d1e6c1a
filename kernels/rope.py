"""Rotary position embedding of queries and keys, in one launch.

Su et al., "RoFormer" (2021), section 3.2: the D numbers of a head are D/2 points in the plane, and the token at
position p turns point i by the angle p * frequency[i]. The product of a turned query and a turned key then depends on
how far apart the two tokens are, and not on where they stand.

Which two numbers make a point is a convention. The paper pairs neighbours; Llama's weights in transformers pair the two
halves of the head (``rotate_half``), and so do we:

    one head of one token          first half                second half
                            a0  a1  a2  ...  a(D/2-1)   b0  b1  b2  ...  b(D/2-1)
                            |_____________point 0_______|
                                |_____________point 1_______|

    a'[i] = a[i] * cos[t, i]       - b[i] * sin[t, i]
    b'[i] = b[i] * cos[t, i + D/2] + a[i] * sin[t, i + D/2]

cos and sin come as transformers' rotary layer gives them: a row for each token, its position already looked up and its
two halves usually equal. So the kernel needs no positions, and every scaling of the frequencies works.

A program turns a tile of HEADS heads of one token: it loads both halves of the tile and writes both, so every number
is read once and written once. Of the programs of token t, the first do its query heads and the others its KV heads:

    program (t, 0)   query heads 0 .. HEADS-1
    program (t, 1)   query heads HEADS .. 2*HEADS-1  (those beyond Hq are masked)
    program (t, 2)   KV heads 0 .. HEADS-1

q and k may be views with any strides in their first two dimensions, as transformers hands them: it computes them as one
matrix product and transposes the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cbref_kernels.common import DTYPES


@triton.jit
def _rotate(
    x_ptr, out_ptr, cos_ptr, sin_ptr, first, heads, head_stride,
    HALF: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Turn heads first : first + HEADS of one token. The pointers point at the token's row."""
    head = first.to(tl.int64) + tl.arange(0, HEADS)[:, None]  # a column of numbers and ...
    column = tl.arange(0, COLUMNS)[None, :]  # ... a row of them: together the tile, by broadcasting
    row_mask = column < HALF
    mask = (head < heads) & row_mask

    cos_a = tl.load(cos_ptr + column, mask=row_mask, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + column, mask=row_mask, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + HALF + column, mask=row_mask, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + HALF + column, mask=row_mask, other=0.0).to(tl.float32)

    source = x_ptr + head * head_stride + column
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)

    target = out_ptr + head * (2 * HALF) + column
    dtype = out_ptr.dtype.element_ty
    tl.store(target, (a * cos_a - b * sin_a).to(dtype), mask=mask)
    tl.store(target + HALF, (b * cos_b + a * sin_b).to(dtype), mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    q_stride, q_head_stride, k_stride, k_head_stride, cos_stride, sin_stride, query_heads, key_heads,
    HALF: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    query_tiles = tl.cdiv(query_heads, HEADS)
    cos_ptr += token * cos_stride
    sin_ptr += token * sin_stride
    if tile < query_tiles:
        q_ptr += token * q_stride
        q_out_ptr += token * query_heads * (2 * HALF)
        _rotate(q_ptr, q_out_ptr, cos_ptr, sin_ptr, tile * HEADS, query_heads, q_head_stride, HALF, HEADS, COLUMNS)
    else:
        first = (tile - query_tiles) * HEADS
        k_ptr += token * k_stride
        k_out_ptr += token * key_heads * (2 * HALF)
        _rotate(k_ptr, k_out_ptr, cos_ptr, sin_ptr, first, key_heads, k_head_stride, HALF, HEADS, COLUMNS)


def _launch(heads: int, dim: int) -> dict:
    """Tiles of up to 1024 points, and a warp for every 256 of them: 8 a thread, which is 16 numbers."""
    columns = triton.next_power_of_2(dim // 2)
    rows = min(triton.next_power_of_2(heads), max(1024 // columns, 1))
    return {"HALF": dim // 2, "HEADS": rows, "COLUMNS": columns, "num_warps": max(rows * columns // 256, 1)}


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` [T, Hq, D], ``k`` [T, Hkv, D], ``cos`` and ``sin`` [T, D] -> the turned q and k, new and contiguous.

    Computes in float32 and rounds once, to the dtype of q and k; cos and sin may have another. D is even and at most
    256. ``ValueError`` for other D and for shapes, dtypes or strides that do not fit.
    """
    tokens, query_heads, dim = q.shape
    if dim % 2 or not 2 <= dim <= 256:
        raise ValueError(f"head dimension is {dim}; rope takes even ones up to 256: use rope_torch")
    if k.shape[0] != tokens or k.shape[2:] != (dim,):
        raise ValueError(f"k has shape {tuple(k.shape)} and q {tuple(q.shape)}: only the number of heads may differ")
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        raise ValueError(f"q is {q.dtype} and k {k.dtype}: give both in float16, bfloat16 or float32")
    for name, tensor in (("cos", cos), ("sin", sin)):
        if tensor.shape != (tokens, dim):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {(tokens, dim)}: give a row for each token")
    for name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, not 1: call .contiguous()")

    key_heads = k.shape[1]
    q_out = torch.empty((tokens, query_heads, dim), dtype=q.dtype, device=q.device)
    k_out = torch.empty((tokens, key_heads, dim), dtype=q.dtype, device=q.device)
    launch = _launch(max(query_heads, key_heads), dim)
    tiles = triton.cdiv(query_heads, launch["HEADS"]) + triton.cdiv(key_heads, launch["HEADS"])
    if tokens and tiles:
        _rope_kernel[(tokens, tiles)](
            q, k, cos, sin, q_out, k_out, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            cos.stride(0), sin.stride(0), query_heads, key_heads, **launch,
        )  # fmt: skip
    return q_out, k_out


def rope_torch(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch."""
    cos, sin = cos[:, None].float(), sin[:, None].float()  # [T, 1, D]: the same for all heads
    results = []
    for x in (q, k):
        a, b = x.float().chunk(2, dim=-1)
        turned = x * cos + torch.cat((-b, a), dim=-1) * sin
        results.append(turned.to(x.dtype))
    return tuple(results)
