"""What a request is answered does not depend on how it was scheduled: policy, budget, chunks, order, admission, prefix
caching and preemption change when tokens come, and never which. In float32, where rounding does not decide."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_support import Around, assert_at_rest, executor_of, greedy, reference, serve, tiny_model
from scheduling_support import finish

from cbref import Engine, SamplingParams
from cbref.schedulers import ADMISSIONS, ORDERS, POLICIES

SIZES = (1, 7, 16, 256)
CHUNKED = {
    "sarathi": {},
    "sarathi_2023": {},
    "sglang": {},
    "sglang mixed": {"mixed_chunk": True},
    "trtllm": {"chunked_context": True},
}

SHARED = [11, 5, 70, 5, 23, 42, 8, 30, 12, 3, 77, 64]
PROMPTS = [
    [*SHARED, 1, 2, 3],
    [4],
    [*SHARED, 1, 2, 9, 9, 9],
    [*SHARED, 1, 2, 3],  # the first once more
    [50, 51, 52, 53, 54, 55],
    SHARED[:8],
    [*SHARED, 60, 61],
]
PARAMS = [
    greedy(9),
    SamplingParams(max_tokens=7, temperature=1.0, seed=7, ignore_eos=True),
    SamplingParams(max_tokens=11, temperature=0.8, top_p=0.9, seed=2**63 - 1, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.3, top_k=20, seed=7, ignore_eos=True),
    greedy(12),
    greedy(8),
    SamplingParams(max_tokens=10, temperature=1.0, seed=11, ignore_eos=True),
]
TIGHT = 8  # blocks of four: the longest request ends with seven


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request):
    """With and without a sliding window, shorter than the prompts."""
    return tiny_model(request.param, **({"sliding_window": 7} if request.param == "mistral" else {}))


@pytest.fixture(scope="module")
def alone(model):
    """Each request by itself, without any scheduling; greedy ones by transformers."""
    answers = [serve(executor_of(model), [p], q)[0].token_ids for p, q in zip(PROMPTS, PARAMS, strict=True)]
    for prompt, params, ids in zip(PROMPTS, PARAMS, answers, strict=True):
        assert params.temperature > 0 or ids == reference(model, prompt, params.max_tokens)[0]
    return answers


@pytest.fixture(scope="module")
def tight(model):
    return executor_of(model, num_blocks=TIGHT)


def outputs(executor, policy, **options):
    engine = Engine(executor, policy, **options)
    requests = [
        engine.add_request(p, q, priority=i * 3 % 4) for i, (p, q) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    ]
    finish(engine)
    assert_at_rest(engine)
    return [r.output for r in requests], engine, sum(r.num_cached for r in requests)


def admission(policy, name):
    if policy == "trtllm":
        return {"capacity": {"reserve": "guaranteed_no_evict", "optimistic": "max_utilization"}[name]}
    return {"admission": name}


def test_budgets_and_chunks(tight, alone):
    """Every policy that cuts prompts, every size as a budget and as a chunk. Orders, admission and caching take turns,
    in a way that brings every pair of them together."""
    turns = itertools.cycle(itertools.product(ORDERS, ADMISSIONS, (True, False)))
    preemptions = cached = 0
    for (name, own), size, as_budget in itertools.product(CHUNKED.items(), SIZES, (True, False)):
        policy = name.split()[0]
        order, admits, caching = next(turns)
        slots = min(4, size) if as_budget else 4  # a budget gives every running request its token
        limit = {"max_num_batched_tokens": size} if as_budget else {"chunk_size": size}
        options = {"order": order, "prefix_caching": caching, **admission(policy, admits), **own, **limit}
        done, engine, hits = outputs(tight, policy, max_num_seqs=slots, **options)
        assert done == alone, f"{name}, {options}"
        widest = max(s.stop - s.start for step in engine.steps for s in step.shares)
        assert widest <= size and (not as_budget or max(step.num_tokens for step in engine.steps) <= size)
        assert admits == "optimistic" or not engine.scheduler.num_preemptions
        assert caching or not hits
        preemptions += engine.scheduler.num_preemptions
        cached += hits
    assert preemptions > 40 and cached > 400, (preemptions, cached)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "vllm_v1"])
def test_orders_admissions_and_caching(tight, alone, policy):
    for order, admits, caching in itertools.product(ORDERS, ADMISSIONS, (False, True)):
        if policy == "static" and admits == "optimistic":
            continue
        own = {"chunk_size": 5} if policy == "sarathi_2023" else {}
        options = {"order": order, "prefix_caching": caching, **admission(policy, admits), **own}
        done, engine, hits = outputs(tight, policy, max_num_seqs=4, **options)
        assert done == alone, options
        assert bool(engine.scheduler.num_preemptions) == (admits == "optimistic"), "the pool is not tight"
        assert bool(hits) == caching, "the prefix that they share was not found, or nobody asked for it"


@pytest.mark.parametrize("policy", ["static", "orca", "prefill_first", "trtllm"])
def test_budgets_of_policies_that_do_not_cut(tight, alone, policy):
    """The tightest budget that the longest of these requests fits into, with its output where it may come again."""
    for budget, caching in itertools.product((27, 40), (False, True)):
        done, engine, _ = outputs(tight, policy, max_num_seqs=4, max_num_batched_tokens=budget, prefix_caching=caching)
        assert done == alone
        assert max(step.num_tokens for step in engine.steps) <= budget


# ---- everything that a request carries goes through preemption unharmed

OPTIMISTIC = {
    "orca": {"admission": "optimistic"},
    "prefill_first": {},
    "sarathi_2023": {"chunk_size": 4},
    "sarathi": {"max_num_batched_tokens": 8},
    "trtllm": {"capacity": "max_utilization"},
    "sglang": {"max_num_batched_tokens": 8},
}
FREE = [30, 12, 30, 12, 30, 12, 7, 7]


@pytest.fixture(scope="module")
def ends():
    """A model whose end-of-sequence id is one that it says early, and the place where it would."""
    free = reference(tiny_model(), FREE, 24)[0]
    at = next(i for i in range(4, 24) if free[i] not in free[:i])
    return tiny_model(eos_token_id=free[at]), free, at


@pytest.mark.parametrize("policy", OPTIMISTIC)
def test_sampling_parameters_survive_preemption(ends, policy):
    model, free, at = ends
    params = {
        "repetition": greedy(20, repetition_penalty=1.8),
        "presence": greedy(20, presence_penalty=1.9),
        "frequency": greedy(20, frequency_penalty=1.3),
        "least": SamplingParams(max_tokens=20, min_tokens=at + 4),
        "stop": SamplingParams(max_tokens=20, stop_token_ids=[free[at - 1]], ignore_eos=True),
        "end": SamplingParams(max_tokens=20),
        "logprobs": greedy(20, logprobs=4),
        "seed": SamplingParams(
            max_tokens=20, temperature=1.0, seed=3, frequency_penalty=1.0, min_tokens=14, logprobs=2
        ),
    }
    solo = [serve(executor_of(model), [FREE], p)[0] for p in params.values()]
    engine = Engine(
        executor_of(model, num_blocks=TIGHT), policy, max_num_seqs=4, prefix_caching=True, **OPTIMISTIC[policy]
    )
    requests = [engine.add_request(FREE, p, name) for name, p in params.items()]
    finish(engine)
    assert_at_rest(engine)
    assert sum(r.preemptions > 0 for r in requests) >= 3 and sum(r.num_cached for r in requests)
    for request, expected in zip(requests, solo, strict=True):
        done = engine.completion(request)
        assert (done.token_ids, done.finish_reason) == (expected.token_ids, expected.finish_reason), request.id
        assert len(done.logprobs) == len(expected.logprobs)
        for a, b in zip(done.logprobs, expected.logprobs, strict=True):
            assert (a.token_id, list(a.top)) == (b.token_id, list(b.top))
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    by_name = dict(zip(params, solo, strict=True))
    assert len({tuple(c.token_ids) for c in solo}) >= 6, "the parameters change nothing: the test shows nothing"
    assert (by_name["end"].token_ids, by_name["end"].finish_reason) == (free[: at + 1], "stop")


# ---- a broken row beside the prefix cache


def test_a_row_that_is_not_finite_leaves_nothing_behind_for_who_shares_or_comes_later():
    """Token 13 has an embedding of NaN, and lies in a block that two requests share and that both break on at once. The
    attention reads whole blocks, as kernels do: one NaN left behind would spread to the next owner."""
    from test_oracle import dense_attention

    model = tiny_model()
    healthy = [[5, 6, 7], [5, 6, 7, 8, 9, 1], [30] * 9]
    expected = [reference(model, p, 6)[0] for p in healthy]
    model.get_input_embeddings().weight.data[13] = torch.nan
    engine = Engine(
        executor_of(model, num_blocks=5, attention=dense_attention),
        "sarathi",
        max_num_batched_tokens=4,
        max_num_seqs=3,
        prefix_caching=True,
    )
    broken = [engine.add_request([5, 6, 7, 13, last], greedy(6)) for last in (1, 2)]
    finish(engine)
    assert [r.finish_reason for r in broken] == ["error", "error"] and broken[1].num_cached == 4
    assert engine.pool.find_prefix([5, 6, 7, 13, 1]) == []
    requests = [engine.add_request(p, greedy(6)) for p in healthy]
    finish(engine)
    assert [r.error for r in requests] == [None] * 3
    assert [r.output for r in requests] == expected
    assert_at_rest(engine)


# ---- the real model


class Within(Around):
    """The same executor with fewer blocks than its cache has: another would take a second to load."""

    num_blocks = 6


@pytest.fixture(scope="module")
def questions(smollm, smollm_executor):
    _, tokenizer = smollm
    text = tokenizer((Path(__file__).parents[2] / "LICENSE").read_text())["input_ids"][300:]
    prompts = [[*text[:40], *text[100:107]], text[:36], [*text[:33], *text[200:206]]]
    params = [
        greedy(6),
        SamplingParams(max_tokens=14, temperature=0.8, seed=5, ignore_eos=True),
        greedy(12, frequency_penalty=0.5, logprobs=2),
    ]
    unstopped = serve(smollm_executor, [prompts[2]], params[2])[0].text
    params[2] = replace(params[2], stop=unstopped[-8:-3])  # across tokens, and late: after the preemptions
    return prompts, params, [serve(smollm_executor, [p], q)[0] for p, q in zip(prompts, params, strict=True)]


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("sarathi", {"max_num_batched_tokens": 24}),
        ("sglang", {"max_num_batched_tokens": 64, "mixed_chunk": True}),
        ("prefill_first", {}),
    ],
)
def test_the_real_model_answers_as_alone(smollm, smollm_executor, questions, policy, options):
    prompts, params, solo = questions
    engine = Engine(Within(smollm_executor), policy, max_num_seqs=3, prefix_caching=True, **options)
    requests = [engine.add_request(p, q) for p, q in zip(prompts, params, strict=True)]
    finish(engine)
    assert_at_rest(engine)
    assert engine.scheduler.num_preemptions and sum(r.num_cached for r in requests)
    for request, expected in zip(requests, solo, strict=True):
        done = engine.completion(request)
        assert (done.token_ids, done.text, done.finish_reason) == (
            expected.token_ids, expected.text, expected.finish_reason,
        )  # fmt: skip
        assert [p.logprob for p in done.logprobs] == pytest.approx([p.logprob for p in expected.logprobs], abs=1e-3)
