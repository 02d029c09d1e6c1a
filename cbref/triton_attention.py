"""The attention backends that run cbref's Triton kernels, and the choice of a backend.

The kernels are in ``kernels/`` and know nothing of cbref. Here is what an engine needs besides: which one serves which
rows of a step, and what to do where they cannot serve.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import torch

from cbref import attention
from cbref.attention import StepMeta, torch_attention


def triton_attention(
    q, k, v, key_cache, value_cache, meta: StepMeta, scale: float, window: int | None = None
) -> torch.Tensor:
    """Three launches: write keys and values, decodes, longer chunks. Same signature as ``torch_attention``."""
    from cbref_kernels.decode_attention import decode_attention
    from cbref_kernels.kv_write import kv_write
    from cbref_kernels.prefill_attention import prefill_attention

    if window is not None:  # the kernels know no sliding window
        return torch_attention(q, k, v, key_cache, value_cache, meta, scale, window)
    kv_write(k, v, key_cache, value_cache, meta.places)
    n, shape = meta.shape.decodes, meta.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # contiguous, whatever the layout of q
    if n:
        table = meta.block_table[:n, : shape.decode_width]
        decode_attention(q[:n], key_cache, value_cache, table, meta.context_len[:n], scale, out=out[:n])
    if n < len(q):
        if _tensor_cores(q.device):
            starts = meta.query_start[n:] - n
            rest = (meta.block_table[n:], meta.context_len[n:], starts, shape.longest, scale)
            prefill_attention(q[n:], k[n:], v[n:], key_cache, value_cache, *rest, out=out[n:])
        else:
            out[n:] = attention.prefill(q[n:], key_cache, value_cache, meta, scale)
    return out


def triton_mixed_attention(
    q, k, v, key_cache, value_cache, meta: StepMeta, scale: float, window: int | None = None
) -> torch.Tensor:
    """Two launches: write keys and values, then decodes and longer chunks together."""
    from cbref_kernels.kv_write import kv_write
    from cbref_kernels.mixed_attention import mixed_attention

    if window is not None:
        return torch_attention(q, k, v, key_cache, value_cache, meta, scale, window)
    kv_write(k, v, key_cache, value_cache, meta.places)
    return mixed_attention(q, key_cache, value_cache, meta.block_table, meta.context_len, meta.query_start, scale)


BACKENDS = {"torch": torch_attention, "triton": triton_attention, "triton_mixed": triton_mixed_attention}


def choose(
    wanted: str | Callable | None, query_heads: int, key_heads: int, dim: int, model: torch.nn.Module
) -> tuple[Callable, str]:
    """The backend, and what was chosen and why. ``ValueError`` where a wanted backend cannot serve the model."""
    if callable(wanted):
        return wanted, f"{getattr(wanted, '__name__', type(wanted).__name__)}: given as a function"
    if wanted is not None and wanted not in BACKENDS:
        raise ValueError(f"unknown attention {wanted!r}; choose one of {', '.join(BACKENDS)}, or pass a function")
    if wanted == "torch":
        return torch_attention, "torch: asked for"
    obstacle = _obstacle(query_heads, key_heads, dim, model)
    if wanted is None and (obstacle or _interpreted()):
        return torch_attention, f"torch: {obstacle or 'Triton would be interpreted, which is slow'}"
    if obstacle:
        raise ValueError(f"attention is {wanted!r}, but {obstacle}; choose attention='torch', or leave it out")
    name = wanted or "triton"
    if _interpreted():
        return BACKENDS[name], f"{name}: asked for, in Triton's interpreter"
    prefill = "" if _tensor_cores(model.device) else ", prefill by torch (no tensor cores for Triton before sm_80)"
    return BACKENDS[name], f"{name}: {torch.cuda.get_device_name(model.device)}{prefill}"


def _obstacle(query_heads: int, key_heads: int, dim: int, model: torch.nn.Module) -> str | None:
    """Why the kernels cannot serve this model where it is; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (it exists for Linux)"
    if model.device.type != "cuda" and not (_interpreted() and model.device.type == "cpu"):
        return f"Triton needs a GPU, and the model is on {model.device} (for a look, TRITON_INTERPRET=1 interprets)"
    if _interpreted() and model.dtype == torch.bfloat16:
        return "Triton's interpreter computes nonsense in bfloat16"
    if model.dtype == torch.bfloat16 and not _tensor_cores(model.device):
        return "this GPU knows no bfloat16 (those from compute capability 8.0 on do)"
    from cbref_kernels.common import check_heads

    try:
        check_heads(query_heads, key_heads, dim, model.dtype)
    except ValueError as error:
        return str(error)
    return None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _tensor_cores(device: torch.device) -> bool:
    """Whether Triton's ``tl.dot`` becomes matrix instructions: not before Ampere (the T4 is 7.5)."""
    from cbref_kernels.common import capability

    return capability(device) >= (8, 0)
