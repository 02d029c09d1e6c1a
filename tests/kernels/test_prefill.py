"""The two attention kernels for chunks, and their torch twins, against scaled_dot_product_attention in float64."""

from __future__ import annotations

import importlib
import random as stdlib_random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_support import (
    BLOCK_SIZES,
    BOUND,
    DEVICE,
    DTYPES,
    GROUPS,
    Paged,
    paged,
    poisoned_outputs,
    random,
    relative_error,
    same_bits,
)
from torch.nn.functional import scaled_dot_product_attention

from cbref_kernels import common
from cbref_kernels.common import HEAD_DIMS
from cbref_kernels.mixed_attention import mixed_attention, mixed_attention_torch
from cbref_kernels.prefill_attention import prefill_attention, prefill_attention_torch

KERNELS = ["prefill", "mixed"]
NAN = float("nan")


def strided(packed: torch.Tensor) -> torch.Tensor:
    """The same numbers as transformers hands them over: heads before tokens in memory, NaN between the heads."""
    tokens, heads, dim = packed.shape
    buffer = torch.full((heads, tokens + 1, dim), NAN, dtype=packed.dtype, device=packed.device)
    view = buffer[:, :tokens].transpose(0, 1)
    view.copy_(packed)
    return view


def spaced(packed: torch.Tensor) -> torch.Tensor:
    """The same numbers, tokens before heads, with NaN between the tokens: as a part of a wider projection."""
    tokens, heads, dim = packed.shape
    view = torch.full((tokens, heads + 1, dim), NAN, dtype=packed.dtype, device=packed.device)[:, :heads]
    return view.copy_(packed)


def step_of(contexts, chunks, *, group=1, key_heads=2, dim=64, dtype=torch.float32, block_size=16, factor=1.0, seed=0):
    """A step of chunks: queries, fresh keys and values, and the paged cache, NaN wherever it must not be read."""
    cache = paged(contexts, chunks, block_size=block_size, key_heads=key_heads, dim=dim, dtype=dtype, seed=seed)
    q = factor * random(sum(chunks), key_heads * group, dim, dtype=dtype, seed=seed + 99)
    k, v = (
        torch.cat([x[len(x) - chunk :] for x, chunk in zip(tensors, chunks, strict=True)])
        for tensors in (cache.keys, cache.values)
    )
    return SimpleNamespace(cache=cache, q=q, k=k, v=v, chunks=chunks, scale=dim**-0.5)


def call(kernel: str, step, *, twin=False, out=None, longest=None, layouts=(strided, strided, spaced)):
    """Run a kernel or its twin. For prefill the fresh tokens' places in the cache are NaN: it must not read them."""
    cache: Paged = step.cache
    q, k, v = (layout(x) for layout, x in zip(layouts, (step.q, step.k, step.v), strict=True))
    metadata = (cache.block_table, cache.context_len, cache.query_start)
    if kernel == "mixed":
        function = mixed_attention_torch if twin else mixed_attention
        return function(q, cache.key_cache, cache.value_cache, *metadata, step.scale, out)
    caches = [cache.key_cache.clone(), cache.value_cache.clone()]
    for tensor in caches:
        tensor.view(-1, *tensor.shape[2:])[cache.places] = NAN
    function = prefill_attention_torch if twin else prefill_attention
    longest = max(step.chunks) if longest is None else longest
    return function(q, k, v, *caches, *metadata, longest, step.scale, out)


def reference(step) -> torch.Tensor:
    """PyTorch's own attention in float64, request by request."""
    out, bounds = [], step.cache.query_start.tolist()
    for i, (keys, values) in enumerate(zip(step.cache.keys, step.cache.values, strict=True)):
        q = step.q[bounds[i] : bounds[i + 1]].double().transpose(0, 1)
        keys, values = keys.double().transpose(0, 1), values.double().transpose(0, 1)
        mask = torch.ones(q.shape[1], keys.shape[1], dtype=torch.bool, device=q.device)
        mask = mask.tril(keys.shape[1] - q.shape[1])  # the last query sees all keys
        heads = scaled_dot_product_attention(q, keys, values, mask, scale=step.scale, enable_gqa=True)
        out.append(heads.transpose(0, 1))
    return torch.cat(out)


def check(kernel: str, step, bound: float | None = None) -> None:
    bound = BOUND[step.q.dtype] if bound is None else bound
    with poisoned_outputs():
        result, twin = call(kernel, step), call(kernel, step, twin=True)
    expected = reference(step)
    assert relative_error(result, expected) <= bound
    assert relative_error(twin, expected) <= bound


@st.composite
def steps(draw):
    """Ragged chunks of 1 to 70 tokens, some of new requests (start 0), some behind a past."""
    chunks = draw(st.lists(st.sampled_from([1, 2, 16, 17, 64, 70]) | st.integers(1, 70), min_size=1, max_size=3))
    starts = [draw(st.just(0) | st.integers(1, 80)) for _ in chunks]
    group = draw(st.sampled_from(GROUPS))
    return step_of(
        [start + chunk for start, chunk in zip(starts, chunks, strict=True)],
        chunks,
        group=group,
        key_heads=draw(st.sampled_from([1, 2])) if group < 5 else 1,
        dim=draw(st.sampled_from(HEAD_DIMS)),
        dtype=draw(st.sampled_from(DTYPES)),
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        seed=draw(st.integers(0, 2**16)),
    )


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=25)
@given(step=steps())
def test_ragged_chunks(kernel, step):
    check(kernel, step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_head_dimension_and_dtype(kernel, dim, dtype):
    check(kernel, step_of([37, 20, 1], [5, 20, 1], group=3, key_heads=1, dim=dim, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_group(kernel, group, dtype):
    check(kernel, step_of([37], [5], group=group, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_block_size(kernel, block_size, dtype):
    contexts = [block_size + 1, block_size, 2 * block_size + 9]
    check(kernel, step_of(contexts, [2, 5, 7], key_heads=1, block_size=block_size, dtype=dtype))


@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU says itself what it is")
@pytest.mark.parametrize("compute", [(7, 5), (9, 0)], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_tiles_of_other_gpus(kernel, dim, compute, monkeypatch):
    monkeypatch.setattr(common, "CPU_STANDS_FOR", compute)
    check(kernel, step_of([90, 33], [20, 33], group=3, key_heads=1, dim=dim, dtype=torch.float16))


@pytest.mark.parametrize("kernel", KERNELS)
def test_empty_chunks(kernel):
    """Requests that sit out a step, with a past and without, between those that do not."""
    check(kernel, step_of([30, 20, 5, 70, 0, 9, 40], [0, 4, 0, 35, 0, 9, 0], group=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_small_chunk_behind_a_long_past(kernel, dtype):
    check(kernel, step_of([2051, 3], [7, 3], group=2, key_heads=1, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_small_chunk_behind_a_past_of_32k(kernel, dtype, monkeypatch):
    if dtype == torch.float32 and DEVICE == "cpu":
        # Tiles of 16 keys would take the interpreter half a minute. Those of other tests are the ones that ship.
        module = importlib.import_module(f"cbref_kernels.{kernel}_attention")
        small = module.launch_configuration
        monkeypatch.setattr(module, "launch_configuration", lambda *about: small(*about) | {"BLOCK_N": 256})
    step = step_of([32768, 3], [7, 3], key_heads=1, block_size=128, factor=3.0, dtype=dtype)
    check(kernel, step, bound=max(1e-5, BOUND[dtype]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_edges_of_tiles(kernel, dtype):
    """Pasts and chunks that just fill tiles of 16, 32 or 64, and one token less or more."""
    edges = [1, 15, 16, 17, 32, 33, 63, 64, 65]
    check(kernel, step_of([edge + 1 for edge in edges] + edges, [1] * len(edges) + edges, key_heads=1, dtype=dtype))


@pytest.mark.parametrize("kernel", KERNELS)
def test_chunk_of_several_tiles(kernel):
    check(kernel, step_of([300, 289], [290, 1], key_heads=1, dtype=torch.float16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_of_hundreds(kernel, dtype):
    """The exponentials of such logits overflow even fp32; the online softmax never takes them.

    An fp32 logit of 200 is wrong by 1e-5, and so is its exponential, relatively: the bound is wider.
    """
    check(kernel, step_of([90, 40], [30, 40], factor=50.0, dtype=dtype), bound=max(2e-5, BOUND[dtype]))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_that_all_have_one_sign(kernel, sign):
    """Unlike a zero of padding: were masked logits 0, they would outweigh those of -400."""
    step = step_of([70, 33], [20, 33])
    step.q = 50 * sign * step.q.abs()
    for keys, i in zip(step.cache.keys, range(2), strict=True):
        keys.abs_()
        position = torch.arange(len(keys), device=DEVICE)
        step.cache.key_cache[step.cache.block_table[i, position // 16].long(), position % 16] = keys
    step.k = step.k.abs()
    check(kernel, step, bound=1e-4)  # logits beyond 1,000


@pytest.mark.parametrize("kernel", KERNELS)
def test_many_requests_in_one_step(kernel):
    """Bisection of many boundaries: most chunks are decodes, some are whole prompts."""
    numbers = stdlib_random.Random(1)
    chunks = [numbers.choice([1, 1, 1, 2, 5, 40]) for _ in range(29)]
    contexts = [chunk + numbers.choice([0, 3, 20]) for chunk in chunks]
    check(kernel, step_of(contexts, chunks, group=2, key_heads=1, block_size=8))


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_no_chunk_stay(kernel):
    """A step padded for a CUDA graph: more rows than tokens, and requests without tokens."""
    step = step_of([20, 9, 0, 0], [4, 9, 0, 0], group=2)
    padding = torch.full((50, *step.q.shape[1:]), NAN)
    padded = SimpleNamespace(**vars(step))
    padded.q = torch.cat([step.q, padding.to(DEVICE)])
    padded.k, padded.v = (torch.cat([x, padding[:, :2].to(DEVICE)]) for x in (step.k, step.v))
    before = random(*padded.q.shape, seed=5)
    out = before.clone()
    assert call(kernel, padded, out=out, longest=50) is out
    assert same_bits(out[:13], call(kernel, step))
    assert same_bits(out[13:], before[13:])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_request_does_not_depend_on_its_neighbours(kernel):
    contexts, chunks = [50, 21, 80], [18, 21, 1]
    step = step_of(contexts, chunks, group=2)
    together = call(kernel, step)
    cache = step.cache
    for i, chunk in enumerate(chunks):
        rows = slice(sum(chunks[:i]), sum(chunks[: i + 1]))
        alone = SimpleNamespace(**vars(step))
        alone.q, alone.k, alone.v, alone.chunks = step.q[rows], step.k[rows], step.v[rows], [chunk]
        alone.cache = Paged(
            cache.key_cache,
            cache.value_cache,
            cache.block_table[i : i + 1],
            cache.context_len[i : i + 1],
            torch.tensor([0, chunk], dtype=torch.int32, device=DEVICE),
            cache.places[rows],
            cache.keys[i : i + 1],
            cache.values[i : i + 1],
        )
        assert same_bits(call(kernel, alone), together[rows])


@pytest.mark.parametrize("kernel", KERNELS)
def test_cache_of_more_than_two_to_the_31_numbers(kernel, tmp_path):
    if DEVICE != "cpu":
        pytest.skip("a sparse file stands for the memory here")
    step = step_of([40], [5], key_heads=1, block_size=256, dtype=torch.float16)
    small = step.cache
    blocks = 2**31 // (256 * 64) + 2
    for name in ("key_cache", "value_cache"):
        file = torch.from_file(str(tmp_path / name), shared=True, size=blocks * 256 * 64, dtype=torch.float16)
        large = file.view(blocks, 256, 1, 64)
        large[-1] = getattr(small, name)[small.block_table[0, 0]]
        setattr(small, name, large)
    small.block_table = torch.full_like(small.block_table, blocks - 1)
    # Not through ``call``, which would clone the caches. A test above has shown that fresh places are not read.
    metadata = (small.block_table, small.context_len, small.query_start)
    caches = (small.key_cache, small.value_cache)
    if kernel == "mixed":
        result = mixed_attention(step.q, *caches, *metadata, step.scale)
    else:
        result = prefill_attention(step.q, step.k, step.v, *caches, *metadata, 5, step.scale)
    assert relative_error(result, reference(step)) <= BOUND[torch.float16]


@pytest.mark.parametrize("apart", ["tokens", "heads"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_vectors_more_than_two_to_the_31_numbers_apart(kernel, apart):
    if DEVICE != "cpu":
        pytest.skip("memory that nobody touches stands for the memory here")

    def layout(packed):  # the fifth token or head begins at number 2**31
        room = torch.empty(2**31 + 2**12, dtype=packed.dtype)
        strides = (2**29, 64, 1) if apart == "tokens" else (64, 2**29, 1)
        return room.as_strided(packed.shape, strides).copy_(packed)

    step = step_of([40], [5], key_heads=5, dtype=torch.float16)
    assert relative_error(call(kernel, step, layouts=[layout] * 3), reference(step)) <= BOUND[torch.float16]


def arguments(kernel: str, device: str = "cpu", tokens=5, requests=2):
    """Arguments by name for one call, of the right shapes and without meaning."""
    made = {
        "q": torch.empty(tokens, 4, 64, dtype=torch.float16, device=device),
        "k": torch.empty(tokens, 2, 64, dtype=torch.float16, device=device),
        "v": torch.empty(tokens, 2, 64, dtype=torch.float16, device=device),
        "key_cache": torch.empty(7, 16, 2, 64, dtype=torch.float16, device=device),
        "value_cache": torch.empty(7, 16, 2, 64, dtype=torch.float16, device=device),
        "block_table": torch.empty(requests, 3, dtype=torch.int32, device=device),
        "context_len": torch.empty(requests, dtype=torch.int32, device=device),
        "query_start": torch.empty(requests + 1, dtype=torch.int32, device=device),
        "longest": 4,
        "scale": 0.1,
    }
    if kernel == "mixed":
        for name in ("k", "v", "longest"):
            del made[name]
    return made


FUNCTION = {"prefill": prefill_attention, "mixed": mixed_attention}


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_read_on_the_host_nor_launched_for_nothing(kernel, monkeypatch):
    """Meta tensors have no data: reading one raises."""
    grids = []

    class Launches:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    module = importlib.import_module(f"cbref_kernels.{kernel}_attention")
    monkeypatch.setattr(module, f"_{kernel}_kernel", Launches())
    for empty in ({"tokens": 0, "requests": 0}, {"requests": 0}, {"tokens": 0}):
        made = arguments(kernel, device="meta", **empty)
        assert FUNCTION[kernel](**made).shape == made["q"].shape
    assert not grids
    FUNCTION[kernel](**arguments(kernel, device="meta"))
    # A tile of fp16 has 128 queries of a head, or 64 rows: 32 tokens of a group of 2.
    assert grids == [(1, 2, 4) if kernel == "prefill" else ((5 // 32 + 2) * 2,)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"q": a["q"][..., :48].contiguous()}, "head dimension is 48"),
        (lambda a: {"q": a["q"][:, :3]}, "3 query heads on 2 KV heads"),
        (lambda a: {"q": a["q"].repeat(1, 5, 1)}, "20 query heads on 2 KV heads"),
        (lambda a: {"q": a["q"].double()}, "dtype is torch.float64"),
        (lambda a: {"q": a["q"].transpose(0, 2).contiguous().transpose(0, 2)}, "q's last stride is 20, it must be 1"),
        (
            lambda a: {"key_cache": a["key_cache"].float()},
            "key_cache is .* of torch.float32; .* must be .* torch.float16",
        ),
        (lambda a: {"value_cache": a["value_cache"][1:]}, r"value_cache is \(6, 16, 2, 64\) .* must be \(7, 16"),
        (lambda a: {"key_cache": a["key_cache"].transpose(0, 1).contiguous().transpose(0, 1)}, "key_cache's strides"),
        (lambda a: {"block_table": a["block_table"].long()}, "block_table is .* of torch.int64; .* torch.int32"),
        (lambda a: {"block_table": a["block_table"][:1]}, r"block_table is \(1, 3\) .* must be \(2, 3\)"),
        (lambda a: {"block_table": a["block_table"].T.contiguous().T}, "block_table's last stride is 2"),
        (lambda a: {"query_start": a["query_start"][:2]}, r"query_start is \(2,\) .* must be \(3,\)"),
        (lambda a: {"context_len": a["context_len"].float()}, "context_len is .* of torch.float32"),
        (lambda a: {"out": a["q"][:4]}, r"out is \(4, 4, 64\)"),
        (lambda a: {"out": a["q"].transpose(0, 1).contiguous().transpose(0, 1)}, "out's strides"),
    ],
)
def test_refusals(kernel, change, message):
    made = arguments(kernel)
    with pytest.raises(ValueError, match=message):
        FUNCTION[kernel](**made | change(made))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"k": a["k"][:4]}, r"k is \(4, 2, 64\) .* must be \(5, 2, 64\)"),
        (lambda a: {"v": a["v"][:, :1]}, r"v is \(5, 1, 64\)"),
        (lambda a: {"k": a["k"].transpose(0, 2).contiguous().transpose(0, 2)}, "k's last stride is 10"),
        (lambda a: {"longest": 0}, "longest is 0; it must be at least 1"),
        (lambda a: arguments("prefill", device="meta", requests=65536), "65536 requests; a launch takes 65535"),
    ],
)
def test_refusals_of_prefill(change, message):
    made = arguments("prefill")
    with pytest.raises(ValueError, match=message):
        prefill_attention(**made | change(made))
