"""Decode attention over the paged cache, against double precision and its plain twin.

All memory that is no token of a request is NaN, and so is every output before the kernel writes it (kernel_support).
"""

from __future__ import annotations

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
from cbref_kernels import decode_attention as module
from cbref_kernels.decode_attention import MAX_SPLITS, SPLIT_TOKENS, choose_splits

DIMS = (64, 80, 96, 128, 256)
NAN = float("nan")


def step_of(contexts, **options) -> Paged:
    return paged(contexts, [min(context, 1) for context in contexts], **options)


def run(q, step: Paged, scale=None, *, splits=None, out=None, function=None) -> torch.Tensor:
    scale = q.shape[2] ** -0.5 if scale is None else scale
    with poisoned_outputs():
        return (function or module.decode_attention)(
            q, step.key_cache, step.value_cache, step.block_table, step.context_len, scale, splits, out
        )


def reference(q, step: Paged, scale=None) -> torch.Tensor:
    """torch's attention in double precision, request by request; zeros where there is no past."""
    rows = []
    for query, keys, values in zip(q.double(), step.keys, step.values, strict=True):
        keys, values = (x.double().transpose(0, 1) for x in (keys, values))
        row = scaled_dot_product_attention(query[:, None], keys, values, scale=scale, enable_gqa=True)[:, 0]
        rows.append(row if keys.shape[1] else torch.zeros_like(query))
    return torch.stack(rows)


contexts_of_requests = st.lists(
    st.one_of(st.integers(0, 600), st.sampled_from((0, 1, 31, 32, 33, 64, 65, 127, 128, 129))), min_size=1, max_size=3
)


@settings(max_examples=30)
@given(
    contexts=contexts_of_requests,
    block_size=st.sampled_from(BLOCK_SIZES),
    key_heads=st.integers(1, 2),
    group=st.sampled_from(GROUPS),
    dim=st.sampled_from(DIMS),
    dtype=st.sampled_from(DTYPES),
    splits=st.sampled_from((None, *range(1, 9))),
    seed=st.integers(0, 1000),
)
def test_any_batch_agrees_with_double_precision_and_the_twin(
    contexts, block_size, key_heads, group, dim, dtype, splits, seed
):
    step = step_of(contexts, block_size=block_size, key_heads=key_heads, dim=dim, dtype=dtype, seed=seed)
    q = random(len(contexts), key_heads * group, dim, dtype=dtype, seed=seed + 1)
    expected = reference(q, step)
    result = run(q, step, splits=splits)
    twin = run(q, step, splits=splits, function=module.decode_attention_torch)
    assert result.dtype == twin.dtype == dtype
    assert relative_error(result, expected) < BOUND[dtype]
    assert relative_error(twin, expected) < BOUND[dtype]
    assert relative_error(result, twin) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_every_head_dimension_and_dtype(dim, dtype):
    step = step_of([1, 150, 45], block_size=24, key_heads=2, dim=dim, dtype=dtype)
    q = random(3, 6, dim, dtype=dtype, seed=7)
    for splits in (1, 3):
        assert relative_error(run(q, step, splits=splits), reference(q, step)) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
def test_every_group(group, dtype):
    step = step_of([70, 3], key_heads=2, dtype=dtype)
    q = random(2, 2 * group, 64, dtype=dtype, seed=8)
    assert relative_error(run(q, step, splits=2), reference(q, step)) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_size(block_size, dtype):
    step = step_of([block_size + 1, block_size, 300], block_size=block_size, dtype=dtype)
    q = random(3, 4, 64, dtype=dtype, seed=9)
    assert relative_error(run(q, step, splits=2), reference(q, step)) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_splits_changes_rounding_only(dtype):
    step = step_of([600, 3, 0, 257], key_heads=1, dim=128, dtype=dtype)
    q = random(4, 2, 128, dtype=dtype, seed=1)
    one = run(q, step, splits=1)
    for splits in (*range(2, 9), 33, MAX_SPLITS, None):
        assert relative_error(run(q, step, splits=splits), one) < BOUND[dtype]


@pytest.mark.parametrize("splits", (1, 2, 5))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_does_not_see_its_neighbours_not_even_in_the_last_bit(dtype, splits):
    step = step_of([300, 1, 77, 0, 512], key_heads=1, dtype=dtype)
    q = random(5, 3, 64, dtype=dtype, seed=2)
    together = run(q, step, splits=splits)
    for rows in ([0], [2], [4, 2, 0, 1], [3, 3, 2], [4, 0, 0]):
        table = torch.cat([step.block_table, step.block_table.flip(1)], 1)  # wider, and full of others' blocks
        part = Paged(**{**vars(step), "block_table": table[rows], "context_len": step.context_len[rows]})
        assert same_bits(run(q[rows], part, splits=splits), together[rows])
    assert same_bits(run(q, step, splits=splits), together)


@pytest.mark.parametrize("splits", (1, 4))
def test_a_padded_row_gives_zeros_and_reads_nothing(splits):
    step = step_of([0, 40, 0], dim=80)
    q = torch.full((3, 6, 80), NAN, device=DEVICE)
    q[1] = random(6, 80)
    result = run(q, step, splits=splits)
    assert not result[0].any() and not result[2].any()
    assert relative_error(result[1], reference(q, step)[1]) < BOUND[torch.float32]
    nobody = step_of([0, 0], dim=80, extra=0)  # a table without a column
    assert not run(q[:2], nobody, splits=splits).any()


@pytest.mark.parametrize(("dtype", "splits"), [(torch.float16, 1), *((dtype, None) for dtype in DTYPES)])
def test_a_context_of_32768_tokens(dtype, splits):
    step = step_of([32768, 5], key_heads=1, dtype=dtype, block_size=256)
    q = 3 * random(2, 2, 64, dtype=dtype, seed=3)
    assert relative_error(run(q, step, splits=splits), reference(q, step)) < BOUND[dtype]


@pytest.mark.parametrize("splits", (1, 3))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ("random", "rising", "falling", "negative"))
def test_large_scores_neither_overflow_nor_lose_their_weights(order, dtype, splits):
    step = step_of([300], key_heads=1, dtype=dtype, block_size=16)
    q = random(1, 2, 64, dtype=dtype, seed=4).abs()
    if order != "random":  # rising: every tile brings a new maximum; falling: only the first does
        steps = torch.linspace(-1, 1, 300, device=DEVICE) * (-1 if order == "falling" else 1)
        keys = (steps if order != "negative" else -3 - steps)[:, None, None].expand(300, 1, 64).to(dtype)
        places = step.block_table[0, torch.arange(300) // 16].long() * 16 + torch.arange(300, device=DEVICE) % 16
        step.key_cache.view(-1, 1, 64)[places] = keys
        step.keys[0] = keys
    scale = 10.0
    scores = torch.einsum("hd,cd->hc", q[0].double(), step.keys[0][:, 0].double()) * scale
    assert 200 < scores.abs().max() < 3000
    # fp32 resolves a score of 2048 to 2**-12, and the weight's relative error is as large.
    assert relative_error(run(q, step, scale, splits=splits), reference(q, step, scale)) < 2e-3


def test_a_block_beyond_2_to_the_31_numbers_is_found():
    blocks = 2**31 // (256 * 256) + 2
    cache = torch.empty(blocks, 256, 1, 256, dtype=torch.float16, device=DEVICE)  # on a CPU only touched pages exist
    cache[-1] = random(256, 1, 256, dtype=torch.float16)
    table = torch.tensor([[blocks - 1]], dtype=torch.int32, device=DEVICE)
    context = torch.tensor([200], dtype=torch.int32, device=DEVICE)
    q = random(1, 1, 256, dtype=torch.float16, seed=5)
    result = module.decode_attention(q, cache, cache, table, context, 1 / 16, 1)
    past = cache[-1, :200, 0].double()[None]
    expected = scaled_dot_product_attention(q.double(), past, past, scale=1 / 16)
    assert relative_error(result, expected) < BOUND[torch.float16]


@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU says itself what it is")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", (1, 3, 4, 8))
def test_the_configuration_without_tensor_cores(monkeypatch, dtype, group):
    monkeypatch.setattr(common, "CPU_STANDS_FOR", (7, 5))
    for dim in (64, 80, 256):
        step = step_of([200, 9], dim=dim, dtype=dtype)
        q = random(2, 2 * group, dim, dtype=dtype, seed=6)
        assert relative_error(run(q, step, splits=2), reference(q, step)) < BOUND[dtype]


def test_out_is_written_and_returned_and_strided_arguments_are_read_right():
    step = step_of([50, 70])
    q = random(4, 2, 64).transpose(0, 1)  # [2, 4, 64], heads first in memory
    out = torch.full((2, 4, 64), NAN, device=DEVICE)
    wide = torch.cat([step.block_table, torch.full_like(step.block_table, 10**9)], 1)
    step.block_table = wide[:, : step.block_table.shape[1]]
    assert run(q, step, splits=2, out=out) is out
    assert relative_error(out, reference(q, step)) < BOUND[torch.float32]
    assert run(q, step, out=(twin := torch.empty_like(out)), function=module.decode_attention_torch) is twin
    assert relative_error(twin, out) < BOUND[torch.float32]


class Launches:
    """Stands in for a kernel and keeps the grids it was launched with."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *_, **__: None


@pytest.fixture
def launches(monkeypatch):
    attend, join = Launches(), Launches()
    monkeypatch.setattr(module, "_attend_kernel", attend)
    monkeypatch.setattr(module, "_join_kernel", join)
    return attend.grids, join.grids


def test_one_split_needs_one_launch_and_no_request_none(launches):
    attend, join = launches
    step = step_of([50, 70])
    run(random(2, 4, 64), step, splits=1)
    assert (attend, join) == ([(2, 1, 2)], [])
    run(random(2, 4, 64), step, splits=6)
    assert (attend, join) == ([(2, 1, 2), (2, 6, 2)], [(8,)])
    nobody = Paged(**{**vars(step), "block_table": step.block_table[:0], "context_len": step.context_len[:0]})
    assert run(random(0, 4, 64), nobody).shape == (0, 4, 64)
    assert len(attend) == 2 and len(join) == 1


def test_nothing_is_read_back_from_the_device(launches):
    step = step_of([50, 70])
    # Meta tensors have no data: an .item() or .tolist() of them raises.
    moved = {
        name: getattr(step, name).to("meta") for name in ("key_cache", "value_cache", "block_table", "context_len")
    }
    result = run(torch.empty(2, 4, 64, device="meta"), Paged(**{**vars(step), **moved}), splits=2)
    assert result.shape == (2, 4, 64) and len(launches[0]) == 1


@given(st.integers(1, 4096), st.integers(0, 40_000), st.integers(1, 200))
def test_chosen_splits(programs, longest, multiprocessors):
    splits = choose_splits(programs, longest, multiprocessors)
    assert splits in (1, 2, 4, 8, 16, 32, 64)
    assert splits == 1 or longest // splits >= SPLIT_TOKENS
    assert splits == 1 or programs * splits < 8 * multiprocessors
    more_work = choose_splits(programs + 1, longest, multiprocessors)
    assert more_work <= splits <= choose_splits(programs, longest + 1, multiprocessors)


def test_chosen_splits_of_known_sizes():
    assert choose_splits(32 * 8, 8192, 132) == 4  # a full batch on an H200: three waves of programs
    assert choose_splits(1 * 8, 32768, 132) == 64  # one long request still fills the GPU
    assert choose_splits(1 * 8, 300, 132) == 1  # too short to be worth a second launch


def arguments(**changes) -> dict:
    made = {
        "q": torch.zeros(2, 4, 64),
        "key_cache": torch.zeros(5, 16, 2, 64),
        "value_cache": torch.zeros(5, 16, 2, 64),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "context_len": torch.ones(2, dtype=torch.int32),
        "scale": 0.1,
    }
    return {**{k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in made.items()}, **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q": torch.zeros(2, 4, 72)}, "head dimension is 72"),
        ({"q": torch.zeros(2, 5, 64)}, "5 query heads on 2 KV heads"),
        ({"q": torch.zeros(2, 18, 64)}, "18 query heads on 2 KV heads"),
        ({"q": torch.zeros(2, 4, 64).double()}, "dtype is torch.float64"),
        ({"q": torch.zeros(2, 4, 64).half()}, r"key_cache is .* it must be .*q's torch.float16"),
        ({"key_cache": torch.zeros(5, 2, 16, 64).transpose(1, 2)}, "key_cache is .* contiguous"),
        ({"value_cache": torch.zeros(4, 16, 2, 64)}, r"value_cache is \(4, 16, 2, 64\)"),
        ({"value_cache": torch.zeros(5, 16, 2, 80)}, r"value_cache is \(5, 16, 2, 80\)"),
        ({"block_table": torch.zeros(3, 3, dtype=torch.int32)}, r"block_table is \(3, 3\).* 2 requests"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32).t()}, "block_table is .*contiguous block ids"),
        ({"block_table": torch.zeros(2, 3).long()}, r"block_table is torch.int64.*\.int\(\)"),
        ({"context_len": torch.ones(2).long()}, r"context_len is torch.int64.*\.int\(\)"),
        ({"context_len": torch.ones(3, dtype=torch.int32)}, r"context_len is \(3,\)"),
        ({"context_len": torch.ones(4, dtype=torch.int32)[::2]}, "context_len is .* contiguous"),
        ({"out": torch.zeros(2, 64, 4).transpose(1, 2)}, "out is .* pass None"),
        ({"out": torch.zeros(2, 4, 64).half()}, "out is .* torch.float16"),
        ({"splits": 0}, "splits is 0; the kernel takes 1 to 64"),
        ({"splits": 65}, "splits is 65; the kernel takes 1 to 64"),
    ],
)
def test_refusals_name_the_value_and_the_limit(changes, said):
    with pytest.raises(ValueError, match=said):
        module.decode_attention(**arguments(**changes))


def test_more_requests_than_a_launch_takes_are_refused():
    many = {"q": torch.zeros(1, 4, 64).expand(65536, 4, 64), "context_len": torch.ones(65536, dtype=torch.int32)}
    with pytest.raises(ValueError, match="65536 requests; a launch takes 65535"):
        module.decode_attention(**arguments(**many, block_table=torch.zeros(65536, 1, dtype=torch.int32)))
