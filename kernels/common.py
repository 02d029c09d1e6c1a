"""What the kernels' Python sides share: the GPU's generation and the checks of shapes."""

from __future__ import annotations

import torch

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CPU_STANDS_FOR = (8, 0)  # what Triton's interpreter and the cross-compiler (tools/kernel_report.py) take a CPU for


def capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability, such as (9, 0) for an H100."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else CPU_STANDS_FOR


def check_heads(query_heads: int, key_heads: int, dim: int, dtype: torch.dtype) -> int:
    """The number of query heads on one KV head; ``ValueError`` for what the attention kernels cannot take."""
    if dim not in HEAD_DIMS:
        raise ValueError(
            f"head dimension is {dim}; the kernels take {', '.join(map(str, HEAD_DIMS))}: use attention='torch'"
        )
    if query_heads % key_heads or query_heads // key_heads > 8:
        raise ValueError(
            f"{query_heads} query heads on {key_heads} KV heads; the kernels take 1 to 8 whole heads on each: "
            "use attention='torch'"
        )
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; the kernels take float16, bfloat16 and float32: use attention='torch'")
    return query_heads // key_heads
