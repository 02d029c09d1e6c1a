"""What the tests of the kernels share: random tensors, a measure of error, and a paged cache full of traps."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# Before Triton is imported. By default kernels run on the CPU; TRITON_INTERPRET=0 runs the same tests on a GPU.
INTERPRETED = os.environ.setdefault("TRITON_INTERPRET", "1") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16]
if not INTERPRETED:
    DTYPES.append(torch.bfloat16)  # the interpreter's products of bfloat16 are wrong
GROUPS = range(1, 9)  # query heads on a KV head
BLOCK_SIZES = (8, 16, 24, 32, 64, 128, 256)  # 24: neither a power of two nor a part of a tile
BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of relative_error


def random(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers, the same for the same seed on every device."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(DEVICE, dtype)


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference over the largest magnitude of the reference; infinite if the result has a NaN."""
    assert result.shape == reference.shape, f"shape {tuple(result.shape)}, not {tuple(reference.shape)}"
    if result.numel() == 0:
        return 0.0
    difference = (result.double() - reference.double()).abs()
    if not difference.isfinite().all():
        return float("inf")
    return (difference.max() / reference.double().abs().max().clamp_min(1e-30)).item()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality that also holds for NaN, and tells -0.0 from 0.0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


@contextmanager
def poisoned_outputs():
    """Inside, ``torch.empty`` and its kin return NaN, so that an element which a kernel forgets is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # the default; only acts in deterministic mode
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass
class Paged:
    """A step of B chunks over a paged cache. All that is no token of a request is NaN, the null block included."""

    key_cache: torch.Tensor  # [blocks, block_size, Hkv, D]
    value_cache: torch.Tensor
    block_table: torch.Tensor  # [B, N] int32, padded with the null block
    context_len: torch.Tensor  # [B] int32, up to the end of the chunk
    query_start: torch.Tensor  # [B + 1] int32
    places: torch.Tensor  # [T] int64, where the tokens of the step are
    keys: list[torch.Tensor]  # of each request, [context, Hkv, D]: what the cache holds, in order
    values: list[torch.Tensor]


def paged(contexts, chunks=None, *, block_size=16, key_heads=2, dim=64, dtype=torch.float32, seed=0, extra=2) -> Paged:
    """Requests with ``contexts`` tokens, of which the last ``chunks`` (1 each if not given) are this step's.

    The blocks of a request are scattered over the cache in random order, and others lie between them. The cache has
    NaN in front and behind too, so that an address out of bounds shows. Tables are ``extra`` blocks too wide.
    """
    chunks = [1] * len(contexts) if chunks is None else chunks
    needed = [-(-context // block_size) for context in contexts]
    blocks = 2 * sum(needed) + 3
    null = blocks - 1
    order = torch.randperm(null, generator=torch.Generator().manual_seed(seed)).tolist()
    width = max(needed, default=0) + extra
    table = torch.full((len(contexts), width), null, dtype=torch.int32)
    caches = [
        torch.full((blocks + 4, block_size, key_heads, dim), float("nan"), dtype=dtype, device=DEVICE)[2:-2]
        for _ in range(2)
    ]
    lists: tuple[list, list] = ([], [])
    places = []
    for i, (context, chunk) in enumerate(zip(contexts, chunks, strict=True)):
        for j in range(needed[i]):
            table[i, j] = order.pop()
        positions = torch.arange(context)
        where = table[i, positions // block_size].long() * block_size + positions % block_size
        for side, (cache, tensors) in enumerate(zip(caches, lists, strict=True)):
            tensor = random(context, key_heads, dim, dtype=dtype, seed=1000 * seed + 2 * i + side)
            cache.view(-1, key_heads, dim)[where.to(DEVICE)] = tensor
            tensors.append(tensor)
        places.append(where[context - chunk :])
    start = torch.tensor([0, *chunks]).cumsum(0)
    return Paged(
        *caches,
        table.to(DEVICE),
        torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        start.to(DEVICE, torch.int32),
        torch.cat([torch.empty(0, dtype=torch.int64), *places]).to(DEVICE),
        *lists,
    )


def attention_float64(q: torch.Tensor, step: Paged, scale: float, window: int | None = None) -> torch.Tensor:
    """Causal attention of the packed queries [T, Hq, D] in double precision, one chunk after the other."""
    out = torch.full(q.shape, float("nan"), dtype=torch.float64, device=q.device)
    bounds = step.query_start.tolist()
    for first, last, keys, values in zip(bounds, bounds[1:], step.keys, step.values, strict=False):
        group = q.shape[1] // keys.shape[1]
        keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("thd,chd->htc", q[first:last].double(), keys) * scale
        seen = torch.arange(len(keys), device=q.device)
        at = torch.arange(len(keys) - (last - first), len(keys), device=q.device)[:, None]
        hidden = seen > at if window is None else (seen > at) | (seen <= at - window)
        out[first:last] = torch.einsum("htc,chd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
    return out
