"""RMSNorm, with the residual addition before it fused in. The first kernel to read.

    y = x / sqrt(mean(x²) + eps) * weight          the mean over the H numbers of one token

Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4. A Llama layer has two of them, and each
follows an addition to the residual stream. In plain torch that is nine kernels, and most of them read and write all of
x: the time goes into memory traffic. Fused, x is read once and the results are written once.

A *program* is what the GPU starts many of. All run the same code, and each asks for its number, ``tl.program_id``.
Here program t does row t, so T programs cover x:

                 <----------- BLOCK = 1024 ----------->
                 <----- H = 576 ----->
    program 0    x x x x x x x x x x x . . . . . . . .     x  mask True: loaded, summed, stored
    program 1    x x x x x x x x x x x . . . . . . . .     .  mask False: not in memory, counts as 0
      ...
    program T-1  x x x x x x x x x x x . . . . . . . .

A *block* is what a program works on: unlike a thread in CUDA, it holds not one number but an array, kept in the
registers of its threads. Triton spreads the array over the threads and picks the instructions; we say only how many
warps (32 threads each) take part. A block's length is a power of two that is known when the kernel is compiled
(``tl.constexpr``), and most hidden sizes are no power of two. Hence the *mask*: where it is False, a load touches no
memory and yields ``other``, and a store does nothing. Without it, the last program would read beyond the tensor, and
every other one the next token's numbers.

A pointer is an address and no more: the kernel knows neither shapes nor bounds. ``x_ptr + row * stride + column`` is
the address of x[row, column], counted in elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cbref_kernels.common import DTYPES

LARGEST = 16384  # a row stays in the registers of one program: 16 numbers for each of its at most 1024 threads


@triton.jit
def _rmsnorm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, x_stride, residual_stride, size, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # 64 bits, since row * stride can exceed 2**31
    column = tl.arange(0, BLOCK)  # the block [0, 1, ..., BLOCK - 1]; arithmetic on it is element by element
    mask = column < size
    dtype = y_ptr.dtype.element_ty

    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:  # decided when the kernel is compiled: None makes a second version without this part
        x += tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
        total = x.to(dtype)
        tl.store(sum_ptr + row * size + column, total, mask=mask)
        x = total.to(tl.float32)  # the norm sees the rounded sum, as it does where the addition is a kernel of its own

    mean = tl.sum(x * x, axis=0) / size  # over the row: the zeros of the padding add nothing
    normed = (x * tl.rsqrt(mean + eps)).to(dtype)  # rounded before the product with the weight, as in transformers
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    # A product of two 16-bit numbers is exact in 32 bits, so this rounds once, as a product in 16 bits would.
    y = normed.to(tl.float32) * weight.to(tl.float32)
    tl.store(y_ptr + row * size + column, y.to(dtype), mask=mask)


def _launch(size: int) -> dict:
    """A power of two that holds a row, and a warp for every 512 numbers of it: 16 a thread."""
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": max(block // 512, 1)}


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``x`` [..., H] and ``weight`` [H] -> y [..., H]; with ``residual`` [..., H] -> (norm of the sum, the sum).

    Both results are new and in the dtype of x. Computes in float32, and rounds where transformers' LlamaRMSNorm does.
    For inference: no gradient flows back. ``ValueError`` for rows above 16384 numbers and for shapes, dtypes or strides
    that do not fit.
    """
    size = x.shape[-1]
    if size > LARGEST:
        raise ValueError(f"rows of {size} numbers; rmsnorm takes up to {LARGEST}: use rmsnorm_torch")
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}; rmsnorm takes float16, bfloat16 and float32: convert it")
    if weight.shape != (size,):
        raise ValueError(f"weight has shape {tuple(weight.shape)}; x has rows of {size} numbers: give [{size}]")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)} and x {tuple(x.shape)}: give them the same")
    for name, tensor in (("x", x), ("weight", weight), ("residual", residual)):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} is {tensor.dtype} and x {x.dtype}: convert one of them")
        if tensor.stride(-1) != 1 and size > 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension, not 1: call .contiguous()")

    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(y)
    if x.numel():
        rows = x.reshape(-1, size)  # a view, unless the leading dimensions cannot be walked with one stride
        residual_rows = None if residual is None else residual.reshape(-1, size)
        residual_stride = 0 if residual is None else residual_rows.stride(0)
        _rmsnorm_kernel[(len(rows),)](
            rows, residual_rows, weight, y, total, rows.stride(0), residual_stride, size, eps, **_launch(size)
        )
    return y if residual is None else (y, total)


def rmsnorm_torch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch."""
    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = weight * normed.to(x.dtype)
    return y if residual is None else (y, total)
