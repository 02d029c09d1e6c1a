"""RMSNorm, rotary embedding and the write into the paged cache, against transformers, torch and double precision."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_support import BOUND, DEVICE, DTYPES, paged, poisoned_outputs, random, relative_error, same_bits
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from cbref_kernels import kv_write as kv_write_module
from cbref_kernels import rmsnorm as rmsnorm_module
from cbref_kernels import rope as rope_module
from cbref_kernels.common import HEAD_DIMS
from cbref_kernels.kv_write import kv_write, kv_write_torch
from cbref_kernels.rmsnorm import rmsnorm, rmsnorm_torch
from cbref_kernels.rope import rope, rope_torch

FEW = settings(max_examples=40)
NAN = float("nan")


def in_nan(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers as a view into NaN, its first two dimensions strided as ``layout`` says."""
    if layout == "contiguous":
        room = torch.full((tensor.numel() + 256,), NAN, dtype=tensor.dtype, device=tensor.device)
        view = room[128:-128].view(tensor.shape)
    elif layout == "swapped":  # as transformers hands it: [heads, tokens, D] transposed
        view = in_nan(tensor.transpose(0, 1).contiguous(), "contiguous").transpose(0, 1)
    else:  # "sliced": a part of the result of one product for queries, keys and values
        room = torch.full((len(tensor) + 2, *tensor.shape[1:-1], tensor.shape[-1] + 24), NAN, dtype=tensor.dtype)
        view = room.to(tensor.device)[1:-1, ..., 8:-16]
    view.copy_(tensor)
    return view


LAYOUTS = st.sampled_from(["contiguous", "swapped", "sliced"])


class NoLaunch:
    def __getitem__(self, grid):
        raise AssertionError(f"launched with grid {grid}")


# RMSNorm


def norm_float64(x, weight, eps):
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


@FEW
@given(
    rows=st.integers(1, 5),
    size=st.integers(1, 1500),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),  # where eps counts, and where a square would overflow float16
    with_residual=st.booleans(),
    layouts=st.tuples(*[st.sampled_from(["contiguous", "sliced"])] * 2),
    seed=st.integers(0, 1000),
)
@example(1, 16384, torch.float16, 1.0, True, ("contiguous", "contiguous"), 0)
@example(3, 576, torch.float16, 300.0, True, ("sliced", "contiguous"), 1)
def test_rmsnorm(rows, size, dtype, scale, with_residual, layouts, seed):
    x = in_nan((random(rows, size, seed=seed) * scale).to(dtype), layouts[0])
    weight = in_nan(random(size, dtype=dtype, seed=seed + 1), "contiguous")
    residual = in_nan((random(rows, size, seed=seed + 2) * scale).to(dtype), layouts[1]) if with_residual else None
    before = x.clone()
    with poisoned_outputs():
        result = rmsnorm(x, weight, 1e-5, residual)
    twin = rmsnorm_torch(x, weight, 1e-5, residual)
    y, y_twin, normed = result, twin, x
    if with_residual:
        (y, total), (y_twin, total_twin) = result, twin
        assert same_bits(total, total_twin)
        normed = x + residual
        assert same_bits(total, normed)
    layer = LlamaRMSNorm(size, eps=1e-5).to(DEVICE, dtype)
    layer.weight.data = weight

    assert y.dtype == dtype and y.is_contiguous()
    assert relative_error(y, norm_float64(normed, weight, 1e-5)) < BOUND[dtype]
    assert relative_error(y, y_twin) < BOUND[dtype]
    assert relative_error(y, layer(normed)) < BOUND[dtype]
    assert same_bits(x, before)


def test_rmsnorm_rounds_where_transformers_does():
    """Without the rounding before the product with the weight, a quarter of the bits would differ."""
    x, weight = random(8, 960, dtype=torch.float16), random(960, dtype=torch.float16, seed=1)
    layer = LlamaRMSNorm(960, eps=1e-5).to(DEVICE, torch.float16)
    layer.weight.data = weight
    assert (rmsnorm(x, weight, 1e-5) == layer(x)).float().mean() > 0.995


def test_rmsnorm_takes_any_leading_dimensions():
    weight = random(72, seed=1)
    x = random(3, 4, 72)
    for view in (x, x.transpose(0, 1), x[0, 0], x[None]):  # of the second, no two dimensions make one
        y = rmsnorm(view, weight, 1e-6)
        assert y.is_contiguous()
        assert relative_error(y, norm_float64(view, weight, 1e-6)) < BOUND[torch.float32]


def test_rmsnorm_shows_a_nan_only_in_its_row():
    x = random(3, 100)
    x[1, 7] = NAN
    y = rmsnorm(x, random(100, seed=1), 1e-6)
    assert y.isnan().all(dim=1).tolist() == [False, True, False]
    assert not y[[0, 2]].isnan().any()


def test_rmsnorm_of_nothing(monkeypatch):
    monkeypatch.setattr(rmsnorm_module, "_rmsnorm_kernel", NoLaunch())
    weight = random(64)
    assert rmsnorm(random(0, 64), weight, 1e-6).shape == (0, 64)
    assert [x.shape for x in rmsnorm(random(2, 0, 64), weight, 1e-6, random(2, 0, 64))] == [(2, 0, 64)] * 2


@pytest.mark.parametrize(
    ("says", "x", "weight", "residual"),
    [
        ("rows of 16385 .* up to 16384: use rmsnorm_torch", torch.ones(1, 16385), torch.ones(16385), None),
        ("x is torch.float64", torch.ones(1, 8).double(), torch.ones(8).double(), None),
        (r"weight has shape \(9,\)", torch.ones(1, 8), torch.ones(9), None),
        ("weight is torch.float32 and x torch.float16", torch.ones(1, 8).half(), torch.ones(8), None),
        (r"residual has shape \(2, 8\)", torch.ones(1, 8), torch.ones(8), torch.ones(2, 8)),
        ("residual is torch.float16", torch.ones(1, 8), torch.ones(8), torch.ones(1, 8).half()),
        ("x has stride 4 .*contiguous", torch.ones(8, 4).T, torch.ones(8), None),
        ("residual has stride 4", torch.ones(4, 8), torch.ones(8), torch.ones(8, 4).T),
    ],
)
def test_rmsnorm_refuses(says, x, weight, residual):
    with pytest.raises(ValueError, match=says):
        rmsnorm(x, weight, 1e-6, residual)


# Rotary embedding


def rope_float64(x, cos, sin):
    a, b = x.double().chunk(2, -1)
    cos_a, cos_b = cos.double()[:, None].chunk(2, -1)
    sin_a, sin_b = sin.double()[:, None].chunk(2, -1)
    return torch.cat([a * cos_a - b * sin_a, b * cos_b + a * sin_b], -1)


@FEW
@given(
    tokens=st.integers(1, 6),
    query_heads=st.integers(1, 40),
    key_heads=st.integers(1, 9),
    half=st.integers(4, 128),
    dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(LAYOUTS, LAYOUTS, st.sampled_from(["contiguous", "sliced"])),
    seed=st.integers(0, 1000),
)
@example(3, 9, 3, 32, torch.float16, ("swapped", "swapped", "contiguous"), 0)
@example(2, 32, 32, 40, torch.float32, ("sliced", "sliced", "sliced"), 1)
@example(1, 40, 9, 128, torch.float16, ("contiguous", "swapped", "contiguous"), 2)  # several tiles of each
def test_rope(tokens, query_heads, key_heads, half, dtype, layouts, seed):
    q = in_nan(random(tokens, query_heads, 2 * half, dtype=dtype, seed=seed), layouts[0])
    k = in_nan(random(tokens, key_heads, 2 * half, dtype=dtype, seed=seed + 1), layouts[1])
    angle = random(tokens, 2 * half, seed=seed + 2) * 100  # the halves differ: each must be used where it belongs
    cos, sin = (in_nan(f(angle).to(dtype), layouts[2]) for f in (torch.cos, torch.sin))
    before = q.clone(), k.clone()
    with poisoned_outputs():
        results = rope(q, k, cos, sin)
    twins = rope_torch(q, k, cos, sin)
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    for x, old, result, twin, their in zip((q, k), before, results, twins, theirs, strict=True):
        exact = rope_float64(x, cos, sin)
        assert result.dtype == dtype and result.is_contiguous()
        assert relative_error(result, exact) < BOUND[dtype] / 2  # one rounding, not two
        assert relative_error(result, exact) <= relative_error(their, exact) + BOUND[torch.float32] / 4
        assert relative_error(result, twin) < BOUND[dtype]
        assert relative_error(result, their) < 2 * BOUND[dtype]
        assert same_bits(x, old)


def test_rope_in_its_place_in_transformers():
    """Their rotary layer, positions in any order, and their transposed queries and keys."""
    config = LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192)
    positions = torch.tensor([[5000, 0, 1, 17, 8191]], device=DEVICE)
    q, k = random(1, 5, 9, 64).transpose(1, 2), random(1, 5, 3, 64, seed=1).transpose(1, 2)
    cos, sin = LlamaRotaryEmbedding(config).to(DEVICE)(q, positions)
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    ours = rope(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0])
    for our, their in zip(ours, theirs, strict=True):
        assert relative_error(our, their[0].transpose(0, 1)) < BOUND[torch.float32]


def test_rope_takes_cos_and_sin_in_float32():
    """With cos and sin not rounded to float16, the result is as good as float16 can hold."""
    q, k, angle = random(4, 5, 64, dtype=torch.float16), random(4, 1, 64, dtype=torch.float16), random(4, 64) * 9
    for x, result in zip((q, k), rope(q, k, angle.cos(), angle.sin()), strict=True):
        assert result.dtype == torch.float16
        assert relative_error(result, rope_float64(x, angle.cos(), angle.sin())) < BOUND[torch.float16] / 2


def test_rope_takes_one_row_for_all_tokens():
    """An expanded row has stride 0."""
    q, k, angle = random(4, 5, 16), random(4, 1, 16), random(1, 16) * 9
    cos, sin = angle.cos().expand(4, 16), angle.sin().expand(4, 16)
    assert relative_error(rope(q, k, cos, sin)[0], rope_float64(q, cos, sin)) < BOUND[torch.float32]


def test_rope_of_nothing(monkeypatch):
    monkeypatch.setattr(rope_module, "_rope_kernel", NoLaunch())
    q, k = rope(random(0, 9, 64), random(0, 3, 64), random(0, 64), random(0, 64))
    assert q.shape == (0, 9, 64) and k.shape == (0, 3, 64)


@pytest.mark.parametrize(
    ("says", "q", "k", "cos"),
    [
        ("dimension is 258; .* up to 256: use rope_torch", (2, 4, 258), (2, 1, 258), (2, 258)),
        ("dimension is 65; rope takes even", (2, 4, 65), (2, 1, 65), (2, 65)),
        (r"k has shape \(2, 1, 32\)", (2, 4, 64), (2, 1, 32), (2, 64)),
        (r"k has shape \(3, 1, 64\)", (2, 4, 64), (3, 1, 64), (2, 64)),
        (r"cos has shape \(2, 32\), not \(2, 64\)", (2, 4, 64), (2, 1, 64), (2, 32)),
        (r"cos has shape \(3, 64\), not \(2, 64\)", (2, 4, 64), (2, 1, 64), (3, 64)),
    ],
)
def test_rope_refuses_shapes(says, q, k, cos):
    with pytest.raises(ValueError, match=says):
        rope(torch.ones(q), torch.ones(k), torch.ones(cos), torch.ones(cos))


def test_rope_refuses_dtypes_and_strides():
    q, k, cos = torch.ones(2, 4, 64), torch.ones(2, 1, 64), torch.ones(2, 64)
    with pytest.raises(ValueError, match=r"q is torch.float32 and k torch.float16"):
        rope(q, k.half(), cos, cos)
    with pytest.raises(ValueError, match=r"q is torch.float64"):
        rope(q.double(), k.double(), cos, cos)
    with pytest.raises(ValueError, match=r"q has stride 4 .*contiguous"):
        rope(torch.ones(2, 64, 4).transpose(1, 2), k, cos, cos)
    with pytest.raises(ValueError, match="sin has stride 2"):
        rope(q, k, cos, torch.ones(64, 2).T)


# The write into the cache


@FEW
@given(
    tokens=st.integers(1, 12),
    heads=st.integers(1, 20),
    dim=st.integers(1, 256),
    block_size=st.integers(1, 20),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),  # bits are bits, also in the interpreter
    layouts=st.tuples(LAYOUTS, LAYOUTS),
    seed=st.integers(0, 1000),
)
@example(8, 3, 64, 16, torch.bfloat16, ("contiguous", "swapped"), 0)
@example(2, 20, 128, 16, torch.float32, ("sliced", "swapped"), 0)  # two tiles, the second not full
def test_kv_write(tokens, heads, dim, block_size, dtype, layouts, seed):
    blocks = tokens // block_size + 2
    shuffled = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(seed))
    places = shuffled[:tokens].to(DEVICE)
    written = torch.arange(tokens, device=DEVICE) % 3 != 1
    places = torch.where(written, places, -1 - places)
    rooms = [random(blocks + 2, block_size, heads, dim, dtype=dtype, seed=seed + i) for i in range(2)]
    caches = [room[1:-1] for room in rooms]  # the blocks in front and behind show a write out of bounds
    tensors = [random(tokens, heads, dim, dtype=dtype, seed=seed + i) for i in (2, 3)]
    tensors[0][0, 0, 0], tensors[1][-1, -1, -1] = -0.0, NAN
    tensors = [in_nan(tensor, layout) for tensor, layout in zip(tensors, layouts, strict=True)]
    expected, twins = [room.clone() for room in rooms], [cache.clone() for cache in caches]
    for room, tensor in zip(expected, tensors, strict=True):
        room[1:-1].view(-1, heads, dim).index_copy_(0, places[written], tensor[written])
    assert kv_write(*tensors, *caches, places) is None
    kv_write_torch(*tensors, *twins, places)
    for room, cache, right, twin in zip(rooms, caches, expected, twins, strict=True):
        assert same_bits(room, right)
        assert same_bits(cache, twin)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("dim", "block_size"), [*product(HEAD_DIMS, (8, 24, 256)), *product((80,), (16, 32, 64, 128))])
def test_kv_write_puts_a_step_where_its_block_tables_say(dim, block_size, dtype):
    step = paged([5, 40, 16], [5, 1, 3], block_size=block_size, key_heads=2, dim=dim, dtype=dtype)
    k, v = (torch.cat([x[-n:] for x, n in zip(side, (5, 1, 3), strict=True)]) for side in (step.keys, step.values))
    keys, values = step.key_cache.clone(), step.value_cache.clone()
    for cache in (step.key_cache, step.value_cache):
        cache.view(-1, 2, dim)[step.places] = NAN
    kv_write(k, v, step.key_cache, step.value_cache, step.places)
    assert same_bits(step.key_cache, keys) and same_bits(step.value_cache, values)


def test_kv_write_beyond_32_bits():
    """Element 2**31 and more. The pages of so large a cache that nobody touches take no memory."""
    cache = torch.empty(2**31 // (16 * 256) + 2, 16, 2, 128, dtype=torch.float16, device=DEVICE)
    last = cache.shape[0] * 16 - 1
    k = random(2, 2, 128, dtype=torch.float16)
    kv_write(k, k, cache, cache, torch.tensor([last, 3], device=DEVICE))
    assert last * 256 > 2**31
    assert same_bits(cache[-1, -1], k[0]) and same_bits(cache[0, 3], k[1])


def test_kv_write_of_nothing(monkeypatch):
    monkeypatch.setattr(kv_write_module, "_kv_write_kernel", NoLaunch())
    cache = random(2, 16, 3, 64)
    kv_write(random(0, 3, 64), random(0, 3, 64), cache, cache, torch.empty(0, dtype=torch.int64, device=DEVICE))


@pytest.mark.parametrize(
    ("says", "changed"),
    [
        (r"v has shape \(4, 2, 64\)", {"v": torch.ones(4, 2, 64)}),
        ("places is torch.int32", {"places": torch.arange(4).int()}),
        (r"places is torch.int64 \(3,\)", {"places": torch.arange(3)}),
        (r"key_cache has shape \(2, 16, 4, 64\)", {"key_cache": torch.ones(2, 16, 4, 64)}),
        (r"value_cache has shape \(3, 16, 3, 64\)", {"value_cache": torch.ones(3, 16, 3, 64)}),
        ("value_cache has strides", {"value_cache": torch.ones(2, 3, 16, 64).transpose(1, 2)}),
        ("value_cache is torch.float16 and k torch.float32", {"value_cache": torch.ones(2, 16, 3, 64).half()}),
        ("v is torch.float16", {"v": torch.ones(4, 3, 64).half()}),
        ("k has stride 3 .*contiguous", {"k": torch.ones(4, 64, 3).transpose(1, 2)}),
    ],
)
def test_kv_write_refuses(says, changed):
    good = {"k": torch.ones(4, 3, 64), "v": torch.ones(4, 3, 64), "places": torch.arange(4)}
    good |= {"key_cache": torch.ones(2, 16, 3, 64), "value_cache": torch.ones(2, 16, 3, 64)}
    with pytest.raises(ValueError, match=says):
        kv_write(**good | changed)
