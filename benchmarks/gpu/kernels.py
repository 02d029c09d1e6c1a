"""Every kernel: is it right, and how much of the machine does it use?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from cbref_kernels.decode_attention import decode_attention
from cbref_kernels.kv_write import kv_write, kv_write_torch
from cbref_kernels.prefill_attention import prefill_attention
from cbref_kernels.rmsnorm import rmsnorm, rmsnorm_torch
from cbref_kernels.rope import rope, rope_torch
from gpu.machine import NO_GPU, Machine
from gpu.parts import Row, attempt, check, figure, goal, not_run

# Relative to the largest number of the exact result: about two roundings to the dtype.
BOUND = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
HEADS = (32, 8, 128)  # query heads, key heads, head dimension of the speed measurements: Llama 3
OLD_GPU = "before sm_80 the engine leaves prefill to torch"


@dataclass
class Step:
    """A step over a paged cache whose blocks are scattered; the cache holds the step's own keys and values already."""

    q: torch.Tensor  # [T, Hq, D]
    k: torch.Tensor  # [T, Hkv, D]
    v: torch.Tensor
    key_cache: torch.Tensor  # [blocks + 1, block_size, Hkv, D]; the last is the null block
    value_cache: torch.Tensor
    table: torch.Tensor  # [B, N] int32
    context: torch.Tensor  # [B] int32
    starts: torch.Tensor  # [B + 1] int32
    places: list[torch.Tensor]  # of each request's tokens, int64
    longest: int

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key_cache, self.value_cache


def make_step(machine: Machine, contexts, chunks, heads=None, dtype=None, block_size=16, poison=False) -> Step:
    """Requests of ``contexts`` tokens, the last ``chunks`` of which are this step's. ``poison``: the rest is NaN."""
    query_heads, key_heads, dim = heads or HEADS
    options = {"dtype": dtype or machine.dtype, "device": machine.device}
    needed = [-(-n // block_size) for n in contexts]
    total = sum(needed)
    table = torch.full((len(contexts), max(needed) + 1), total)
    for row, blocks in zip(table, torch.randperm(total).split(needed), strict=True):
        row[: len(blocks)] = blocks
    at = [torch.arange(n) for n in contexts]
    places = [row[p // block_size] * block_size + p % block_size for row, p in zip(table, at, strict=True)]
    places = [p.to(machine.device) for p in places]
    shape = (total + 1, block_size, key_heads, dim)
    caches = [torch.full(shape, torch.nan, **options) if poison else torch.randn(shape, **options) for _ in range(2)]
    if poison:
        for cache in caches:
            cache.view(-1, key_heads, dim)[torch.cat(places)] = torch.randn(sum(contexts), key_heads, dim, **options)
    fresh = torch.cat([p[len(p) - n :] for p, n in zip(places, chunks, strict=True)])
    k, v = (cache.view(-1, key_heads, dim)[fresh] for cache in caches)
    integers = {"dtype": torch.int32, "device": machine.device}
    starts = torch.tensor([0, *chunks]).cumsum(0).to(**integers)
    q = torch.randn(sum(chunks), query_heads, dim, **options)
    return Step(q, k, v, *caches, table.to(**integers), torch.tensor(contexts, **integers), starts, places, max(chunks))


def exact(step: Step, chunks, scale: float) -> torch.Tensor:
    """Causal attention in float64, request by request."""
    results = []
    for q, places in zip(step.q.double().split(list(chunks)), step.places, strict=True):
        group = q.shape[1] // step.k.shape[1]
        k, v = (
            c.view(-1, *c.shape[2:])[places].double().repeat_interleave(group, 1).transpose(0, 1) for c in step.caches
        )
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(len(places) - len(q) + 1)
        results.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(results)


def error_of(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest magnitude; NaN if the result has one."""
    difference = (result.double() - expected.double()).abs().max() / expected.double().abs().max()
    return difference.item()


# ---- is it right?


def _rmsnorm(machine, dtype, residual: bool):
    for rows, size in ((3, 100), (5, 576), (2, 4096)):
        x, more = (torch.randn(rows, size, dtype=dtype, device=machine.device) for _ in range(2))
        args = (x, torch.rand(size, dtype=dtype, device=machine.device), 1e-5, *([more] if residual else []))
        results, expected = rmsnorm(*args), rmsnorm_torch(*args)
        pairs = zip(results, expected, strict=True) if residual else [(results, expected)]
        yield f"{rows} × {size}", max(error_of(*pair) for pair in pairs)


def _rope(machine, dtype):
    for heads in _shapes(machine, dtype):
        q, k = (torch.randn(7, n, heads[2], dtype=dtype, device=machine.device) for n in heads[:2])
        angles = torch.rand(7, heads[2] // 2, device=machine.device).repeat(1, 2) * 6
        args = (q, k, angles.cos().to(dtype), angles.sin().to(dtype))
        yield _name(heads), max(error_of(*pair) for pair in zip(rope(*args), rope_torch(*args), strict=True))


def _kv_write(machine, dtype):
    for heads in _shapes(machine, dtype):
        step = make_step(machine, (1, 17, 40), (1, 9, 4), heads, dtype)
        caches, expected = ([torch.zeros_like(c) for c in step.caches] for _ in range(2))
        places = torch.cat([p[len(p) - n :] for p, n in zip(step.places, (1, 9, 4), strict=True)])
        kv_write(step.k, step.v, *caches, places)
        kv_write_torch(step.k, step.v, *expected, places)
        same = all(torch.equal(*pair) for pair in zip(caches, expected, strict=True))
        yield _name(heads), 0.0 if same else torch.inf


def _decode(machine, dtype):
    contexts = (1, 16, 17, 3000, 9000) if machine.cuda else (1, 16, 40)
    for heads in _shapes(machine, dtype):
        step = make_step(machine, contexts, [1] * len(contexts), heads, dtype, poison=True)
        expected = exact(step, [1] * len(contexts), 0.1)
        for splits in (None, 1, 8):
            out = torch.full_like(step.q, torch.nan)
            decode_attention(step.q, *step.caches, step.table, step.context, 0.1, splits, out=out)
            yield f"{_name(heads)}, splits {splits}", error_of(out, expected)


def _prefill(machine, dtype):
    contexts, chunks = ((5, 700, 1300, 3000), (5, 700, 300, 129)) if machine.cuda else ((5, 40), (5, 19))
    for heads in _shapes(machine, dtype):
        step = make_step(machine, contexts, chunks, heads, dtype, poison=True)
        out = torch.full_like(step.q, torch.nan)
        lengths = (step.table, step.context, step.starts, step.longest)
        prefill_attention(step.q, step.k, step.v, *step.caches, *lengths, 0.1, out=out)
        yield _name(heads), error_of(out, exact(step, chunks, 0.1))


def _mixed(machine, dtype):
    from cbref_kernels.mixed_attention import mixed_attention

    contexts, chunks = ((1, 5000, 700, 3000), (1, 1, 700, 129)) if machine.cuda else ((1, 40, 30), (1, 1, 19))
    for heads in _shapes(machine, dtype):
        step = make_step(machine, contexts, chunks, heads, dtype, poison=True)
        out = mixed_attention(step.q, *step.caches, step.table, step.context, step.starts, 0.1)
        yield _name(heads), error_of(out, exact(step, chunks, 0.1))


def _shapes(machine, dtype) -> list[tuple[int, int, int]]:
    """Query heads, key heads, head dimension. Compiling takes a second each: the odd ones in one dtype only."""
    if not machine.cuda:
        return [(6, 2, 64)]
    return [HEADS, (9, 3, 64)] + ([(20, 4, 96), (8, 1, 256)] if dtype == machine.dtype else [])


def _name(heads) -> str:
    return "{}/{} heads of {}".format(*heads)


CHECKS = {
    "rmsnorm": lambda machine, dtype: _rmsnorm(machine, dtype, residual=False),
    "rmsnorm+residual": lambda machine, dtype: _rmsnorm(machine, dtype, residual=True),
    "rope": _rope,
    "kv_write": _kv_write,
    "decode_attention": _decode,
    "prefill_attention": _prefill,
    "mixed_attention": _mixed,
}


def correctness(kernel: str):
    """A part that holds one kernel against plain torch (attention: in float64), in every dtype."""

    def run(machine: Machine) -> Iterator[Row]:
        for dtype, bound in BOUND.items():
            what = f"{kernel} {str(dtype).removeprefix('torch.')}"
            if dtype == torch.bfloat16 and machine.dtype != dtype:
                yield not_run(what, "no bfloat16 before sm_80" if machine.cuda else f"{NO_GPU} (interpreter)")
                continue
            yield from attempt(what, _check(machine, kernel, what, dtype, 0.0 if kernel == "kv_write" else bound))

    return run


def _check(machine: Machine, kernel: str, what: str, dtype: torch.dtype, bound: float) -> Iterator[Row]:
    errors = dict(CHECKS[kernel](machine, dtype))
    worst = max(errors.values(), key=lambda e: (e != e, e))  # a NaN is worse than any number
    yield check(what, worst, bound, errors=errors)


# ---- how fast is it?


def peaks(machine: Machine) -> Iterator[Row]:
    if not machine.cuda:
        yield from (not_run(what, NO_GPU) for what in ("copy bandwidth", "matrix product"))
        return
    yield figure("copy bandwidth", machine.copy_bandwidth / 1e9, "GB/s")
    yield figure("matrix product", machine.matmul_rate / 1e12, "TFLOP/s", dtype=str(machine.dtype))


def decode_speed(machine: Machine) -> Iterator[Row]:
    """Bytes of keys and values that had to be read, per second, as a share of a copy's read and written bytes."""
    for requests, context in ((32, 8192), (1, 32_768), (128, 1024)):
        what = f"decode attention {requests} × {context}"
        if machine.cuda:
            yield from attempt(what, _decode_speed(machine, what, requests, context))
        else:
            yield not_run(what, NO_GPU)


def _decode_speed(machine: Machine, what: str, requests: int, context: int) -> Iterator[Row]:
    step = make_step(machine, [context] * requests, [1] * requests)
    scale, out = step.q.shape[-1] ** -0.5, torch.empty_like(step.q)
    table = step.table[:, :-1]  # as wide as the contexts, as the engine has it
    call = (step.q, *step.caches, table, step.context, scale)
    seconds = machine.seconds(lambda: decode_attention(*call, out=out))
    read = 2 * requests * context * HEADS[1] * HEADS[2] * machine.dtype.itemsize
    share, raw = 100 * read / seconds / machine.copy_bandwidth, {"seconds": seconds, "bytes": read}
    target = (requests, context) == (32, 8192)
    yield goal(what, share, "% of copy", 80, **raw) if target else figure(what, share, "% of copy", **raw)


def _pairs(requests: int, chunk: int, past: int) -> int:
    return requests * (chunk * past + chunk * (chunk + 1) // 2)


def _prefill_seconds(machine: Machine, requests: int, chunk: int, past: int) -> float:
    step = make_step(machine, [past + chunk] * requests, [chunk] * requests)
    scale, out = step.q.shape[-1] ** -0.5, torch.empty_like(step.q)
    rest = (step.table, step.context, step.starts, chunk, scale)
    return machine.seconds(lambda: prefill_attention(step.q, step.k, step.v, *step.caches, *rest, out=out))


def _contiguous(machine: Machine, requests: int, tokens: int) -> list[torch.Tensor]:
    """q, k, v as torch's own attention wants them: [B, heads, T, D]."""
    query_heads, key_heads, dim = HEADS
    options = {"dtype": machine.dtype, "device": machine.device}
    return [torch.randn(requests, n, tokens, dim, **options) for n in (query_heads, key_heads, key_heads)]


def prefill_speed(machine: Machine) -> Iterator[Row]:
    """As a share of the matrix product's rate (the arithmetic of pairs that attend, no more), and of flash SDPA's."""
    for requests, chunk, past in ((1, 8192, 0), (4, 2048, 0), (4, 512, 7680)):
        what = f"prefill attention {requests} × {chunk}" + (f" after {past}" if past else "")
        if machine.tensor_cores:
            yield from attempt(what, _prefill_speed(machine, what, requests, chunk, past))
        else:
            yield not_run(what, OLD_GPU if machine.cuda else NO_GPU)


def _prefill_speed(machine: Machine, what: str, requests: int, chunk: int, past: int) -> Iterator[Row]:
    flops = 4 * HEADS[0] * HEADS[2] * _pairs(requests, chunk, past)
    ours = _prefill_seconds(machine, requests, chunk, past)
    share = 100 * flops / ours / machine.matmul_rate
    yield figure(what, share, "% of matrix product", seconds=ours, flops=flops)
    if past == 0:  # with a past, torch's flash attention has another causal mask
        q, k, v = _contiguous(machine, requests, chunk)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            theirs = machine.seconds(lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True))
        yield goal(what, 100 * theirs / ours, "% of flash SDPA", 60, seconds=ours, flash_seconds=theirs)


def flex_speed(machine: Machine) -> Iterator[Row]:
    """The same against flex_attention, which compiles a kernel for the mask that it is given."""
    what, tokens = "prefill attention 1 × 8192", 8192
    if not machine.tensor_cores:
        yield not_run(f"{what} against flex_attention", OLD_GPU if machine.cuda else NO_GPU)
        return
    mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, tokens, tokens, machine.device)
    q, k, v = _contiguous(machine, 1, tokens)
    compiled = torch.compile(flex_attention)
    theirs = machine.seconds(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True), record=False)
    ours = _prefill_seconds(machine, 1, tokens, 0)
    yield figure(what, 100 * theirs / ours, "% of flex_attention", seconds=ours, flex_seconds=theirs)


def mixed_speed(machine: Machine) -> Iterator[Row]:
    """One launch for a step of decodes and chunks, against one for the decodes and one for the chunks."""
    what = "mixed kernel, 32 decodes at 2048 and 2 chunks of 512"
    if not machine.tensor_cores:
        yield not_run(f"{what} against two launches", OLD_GPU if machine.cuda else NO_GPU)
        return
    from cbref_kernels.mixed_attention import mixed_attention

    decodes, chunks = 32, [1] * 32 + [512] * 2
    step = make_step(machine, [2048] * len(chunks), chunks)
    scale, out, n = step.q.shape[-1] ** -0.5, torch.empty_like(step.q), decodes

    def two_launches():  # as in cbref.triton_attention
        decode_attention(step.q[:n], *step.caches, step.table[:n], step.context[:n], scale, out=out[:n])
        rest = (step.table[n:], step.context[n:], step.starts[n:] - n, step.longest, scale)
        return prefill_attention(step.q[n:], step.k[n:], step.v[n:], *step.caches, *rest, out=out[n:])

    def one_launch():
        return mixed_attention(step.q, *step.caches, step.table, step.context, step.starts, scale)

    one, two = machine.seconds(one_launch), machine.seconds(two_launches)
    yield figure(what, 100 * two / one, "% of two launches' speed", seconds=one, two_launches_seconds=two)
