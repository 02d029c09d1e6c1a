"""Every sampling parameter does what it says, checked against arithmetic done here on transformers' logits."""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
import torch
from engine_support import POLICIES, VOCAB, executor_of, greedy, next_logits, reference, serve, tiny_model

from cbref import Engine, SamplingParams

PROMPT = [11, 5, 70, 5, 23, 42, 8]
DRAWS = 2000


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def draw(executor, **params):
    """First tokens of as many requests, seeded 0, 1, 2, ..."""
    each = [SamplingParams(max_tokens=1, seed=i, **params) for i in range(DRAWS)]
    return np.array([c.token_ids[0] for c in serve(executor, [PROMPT] * DRAWS, each, slots=250)])


def assert_follows(tokens, probabilities):
    """Pearson's chi-square test at one in a million; the seeds are fixed, so it passes always or never."""
    assert probabilities[tokens].min() > 0, "a token of probability zero was drawn"
    expected = probabilities * len(tokens)
    common = expected >= 5
    counts = np.bincount(tokens, minlength=len(probabilities))
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi2, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    if not freedom:
        return  # one token has it all
    p = torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(chi2 / 2)).item()
    assert p > 1e-6, f"chi-square {chi2:.0f} with {freedom} degrees of freedom"


@pytest.fixture(scope="module")
def logits(tiny):
    return next_logits(tiny, PROMPT)


@pytest.fixture(scope="module")
def executor(tiny):
    return executor_of(tiny, num_blocks=2000)


# ---- distributions


@pytest.mark.parametrize("temperature", [0.5, 1, 1.0, 2.5])
def test_temperature(executor, logits, temperature):
    assert_follows(draw(executor, temperature=temperature), softmax(logits / temperature))


def test_a_step_further_on(tiny, executor):
    """The second token follows its own distribution."""
    params = [SamplingParams(max_tokens=2, seed=i, temperature=1.0, top_k=2) for i in range(DRAWS)]
    pairs = [tuple(c.token_ids) for c in serve(executor, [PROMPT] * DRAWS, params, slots=250)]
    first = kept(next_logits(tiny, PROMPT), 2)
    joint = np.zeros((VOCAB, VOCAB))
    for token in np.flatnonzero(first):
        joint[token] = first[token] * kept(next_logits(tiny, [*PROMPT, token]), 2)
    assert_follows(np.array([a * VOCAB + b for a, b in pairs]), joint.ravel())


def test_the_draws_of_one_request_are_independent(executor):
    params = [SamplingParams(max_tokens=2, seed=i, temperature=1e6, ignore_eos=True) for i in range(DRAWS)]
    pairs = np.array([c.token_ids for c in serve(executor, [PROMPT] * DRAWS, params, slots=250)])
    assert_follows((pairs[:, 1] - pairs[:, 0]) % VOCAB, np.full(VOCAB, 1 / VOCAB))


def kept(logits, k):
    return softmax(np.where(np.argsort(np.argsort(-logits)) < k, logits, -np.inf))


@pytest.mark.parametrize("k", [1, 2, 7, VOCAB, 10**6])
def test_top_k_keeps_the_k_likeliest(executor, logits, k):
    assert_follows(draw(executor, temperature=1.5, top_k=k), kept(logits / 1.5, k))


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.8, 0.99])
def test_top_p_keeps_the_smallest_set_with_that_mass(executor, logits, p):
    probabilities = softmax(logits / 1.5)
    order = np.argsort(-probabilities)
    size = np.searchsorted(np.cumsum(probabilities[order]), p) + 1  # the token that reaches p is in
    assert_follows(draw(executor, temperature=1.5, top_p=p), kept(logits / 1.5, size))


@pytest.mark.parametrize("p", [0.05, 0.4, 1, 1.0])
def test_min_p_keeps_tokens_with_that_share_of_the_likeliest(executor, logits, p):
    probabilities = softmax(logits / 1.5)
    size = (probabilities >= p * probabilities.max()).sum()
    assert_follows(draw(executor, temperature=1.5, min_p=p), kept(logits / 1.5, size))


def test_top_k_applies_before_top_p(executor, logits):
    """As in transformers: the mass that top_p counts is that of the tokens left by top_k."""
    three = np.sort(kept(logits / 1.5, 3))[::-1]
    p = (three[0] + three[:2].sum()) / 2  # reached by the second of the three
    assert_follows(draw(executor, temperature=1.5, top_k=3, top_p=float(p)), kept(logits / 1.5, 2))


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-40, 1e-30, 1e-6, 1e-5, 1e-3])
def test_the_coldest_temperatures_are_greedy(tiny, executor, temperature):
    ids = reference(tiny, PROMPT, 8)[0]
    for completion in serve(executor, [PROMPT] * 3, SamplingParams(max_tokens=8, temperature=temperature)):
        assert completion.token_ids == ids


@pytest.mark.parametrize("temperature", [1e6, 1e30, 1e300])
def test_the_hottest_temperatures_are_uniform(executor, temperature):
    assert_follows(draw(executor, temperature=temperature), np.full(VOCAB, 1 / VOCAB))


# ---- penalties


def by_hand(model, prompt, steps, adjust):
    """Greedy decoding with transformers' logits and a penalty written out; and how often the penalty decided."""
    output, decided = [], 0
    for _ in range(steps):
        logits = next_logits(model, [*prompt, *output])
        output.append(int(adjust(logits.copy(), prompt, output).argmax()))
        decided += output[-1] != logits.argmax()
    return output, decided


def repetition(strength):
    def adjust(logits, prompt, output):
        for token in {*prompt, *output}:
            logits[token] *= 1 / strength if logits[token] > 0 else strength
        return logits

    return adjust


def occurrence(presence, frequency):
    def adjust(logits, prompt, output):
        for token in set(output):
            logits[token] -= presence + frequency * output.count(token)
        return logits

    return adjust


# A prompt of a few tokens repeated, so that the prompt matters, and outputs long enough to repeat themselves.
@pytest.mark.parametrize(
    ("params", "adjust"),
    [
        ({"repetition_penalty": 1.8}, repetition(1.8)),
        ({"repetition_penalty": 2}, repetition(2)),  # an integer: transformers' processor asks for a float
        ({"repetition_penalty": 0.7}, repetition(0.7)),
        ({"presence_penalty": 1.9}, occurrence(1.9, 0)),
        ({"presence_penalty": -1}, occurrence(-1, 0)),
        ({"frequency_penalty": 1.3}, occurrence(0, 1.3)),
        ({"frequency_penalty": -0.6, "presence_penalty": 1.5}, occurrence(1.5, -0.6)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "by_hand",
)
def test_penalties(tiny, executor, params, adjust):
    prompts = [[30, 12, 30, 12, 30, 12], [4], PROMPT]
    done = serve(executor, prompts, greedy(40, **params))
    decisions = 0
    for prompt, completion in zip(prompts, done, strict=True):
        expected, decided = by_hand(tiny, prompt, 40, adjust)
        assert completion.token_ids == expected
        decisions += decided
    assert decisions > 3, "the penalty never mattered: the test shows nothing"


def test_a_penalty_shapes_the_distribution_too(tiny, executor):
    params = [
        SamplingParams(max_tokens=2, seed=i, temperature=0.8, presence_penalty=2, frequency_penalty=1, ignore_eos=True)
        for i in range(DRAWS)
    ]
    pairs = [tuple(c.token_ids) for c in serve(executor, [[4]] * DRAWS, params, slots=250)]
    first = Counter(a for a, _ in pairs).most_common(1)[0][0]
    logits = next_logits(tiny, [4, first])
    logits[first] -= 3
    assert_follows(np.array([b for a, b in pairs if a == first]), softmax(logits / 0.8))


# ---- where an output ends


def test_max_tokens_one_is_one_token_and_one_step(executor):
    """nano-vllm PR#270: max_tokens 1 still ran a decode step."""
    engine = Engine(executor)
    [done] = engine.generate([PROMPT], SamplingParams(max_tokens=1), progress=False)
    assert (len(done.token_ids), done.finish_reason, engine.num_steps) == (1, "length", 1)


@pytest.fixture(scope="module")
def ends():
    """A model with two end-of-sequence ids, its plain greedy run, and the place of the first of the two in it."""
    free = reference(tiny_model(), PROMPT, 20)[0]
    first = next(i for i in range(3, 20) if free[i] not in free[:i])
    second = next(i for i in range(first + 1, 20) if free[i] not in free[:i])
    return tiny_model(eos_token_id=[free[second], free[first]]), free, first


def test_end_of_sequence_ends_the_output_and_is_part_of_it(ends):
    model, free, at = ends
    for policy in POLICIES:
        stopped, ignored = serve(executor_of(model), [PROMPT] * 2, [SamplingParams(max_tokens=20), greedy(20)], policy)
        assert (stopped.token_ids, stopped.finish_reason) == (free[: at + 1], "stop")
        assert (ignored.token_ids, ignored.finish_reason) == (free, "length")


def test_the_last_token_allowed_may_be_the_end(ends):
    model, free, at = ends
    [done] = serve(executor_of(model), [PROMPT], SamplingParams(max_tokens=at + 1))
    assert (done.token_ids, done.finish_reason) == (free[: at + 1], "stop")


@pytest.mark.parametrize("more", [-1, 0, 1, 5])
def test_min_tokens_counts_outputs_and_holds_back_every_end(ends, more):
    """TensorRT-LLM PR#12358 counted the prompt, here longer than some minima; vllm PR#15407 left an id open."""
    model, free, at = ends
    minimum = at + 1 + more
    [done] = serve(executor_of(model), [PROMPT], SamplingParams(max_tokens=20, min_tokens=minimum))
    expected, _ = reference(model, PROMPT, 20, min_new_tokens=minimum)
    assert done.token_ids == expected
    assert not set(done.token_ids[:minimum]) & set(model.generation_config.eos_token_id)
    assert (done.token_ids[: at + 1] == free[: at + 1]) == (more < 0)


def test_stop_token_ids(ends):
    model, free, at = ends
    stop = free[at - 1]
    stopping = SamplingParams(max_tokens=20, stop_token_ids=[stop, 95])
    longer = dataclasses.replace(stopping, min_tokens=at)
    alone = dataclasses.replace(stopping, ignore_eos=True)
    done = serve(executor_of(model), [PROMPT] * 3, [stopping, longer, alone])
    where = free.index(stop)
    assert (done[0].token_ids, done[0].finish_reason) == (free[: where + 1], "stop")
    assert done[2].token_ids == done[0].token_ids, "ignore_eos is about the model's own ids"
    assert stop not in done[1].token_ids[:at]
    eos = model.generation_config.eos_token_id
    expected, _ = reference(model, PROMPT, 20, min_new_tokens=at, eos_token_id=[*eos, stop, 95])
    assert done[1].token_ids == expected


def test_min_tokens_with_every_token_an_end(executor):
    """Nothing is left to choose from; the request and its neighbours go on all the same."""
    params = SamplingParams(max_tokens=4, min_tokens=3, temperature=1.0, stop_token_ids=range(VOCAB))
    silly, neighbour = serve(executor, [PROMPT] * 2, [params, greedy(4)])
    assert 3 <= len(silly.token_ids) <= 4
    assert len(neighbour.token_ids) == 4


# ---- logprobs


def test_logprobs_are_the_models_own_whatever_the_request_does_to_them(tiny, executor):
    params = SamplingParams(
        max_tokens=10, temperature=1.7, top_k=5, seed=3, repetition_penalty=1.5, presence_penalty=1, logprobs=4
    )
    [done] = serve(executor, [PROMPT], params)
    chosen_is_not_likeliest = 0
    for i, (token, got) in enumerate(zip(done.token_ids, done.logprobs, strict=True)):
        expected = np.log(softmax(next_logits(tiny, [*PROMPT, *done.token_ids[:i]])))
        assert got.token_id == token
        assert got.logprob == pytest.approx(expected[token], abs=1e-4)
        assert list(got.top) == np.argsort(-expected)[:4].tolist()
        assert list(got.top.values()) == pytest.approx(np.sort(expected)[::-1][:4].tolist(), abs=1e-4)
        chosen_is_not_likeliest += token != next(iter(got.top))
    assert chosen_is_not_likeliest


def test_logprobs_zero_all_and_none(executor):
    counts = [0, VOCAB, 10**6, None]
    done = serve(executor, [PROMPT] * 4, [greedy(2, logprobs=n) for n in counts])
    assert [[len(entry.top) for entry in c.logprobs] for c in done] == [[0, 0], [VOCAB] * 2, [VOCAB] * 2, []]
    assert sum(np.exp(list(done[1].logprobs[0].top.values()))) == pytest.approx(1, abs=1e-4)


# ---- seeds


MIXED = [
    SamplingParams(max_tokens=12, temperature=1.0, seed=7),
    SamplingParams(max_tokens=9, temperature=0.7, top_p=0.9, seed=7),
    SamplingParams(max_tokens=12, temperature=1.3, top_k=20, repetition_penalty=1.3, seed=2**63 - 1),
    SamplingParams(max_tokens=5, temperature=1.0, seed=0),
    SamplingParams(max_tokens=12, temperature=1.0, min_tokens=3, seed=11),
    SamplingParams(max_tokens=7),
    SamplingParams(max_tokens=12, presence_penalty=1.5),
    SamplingParams(max_tokens=3, temperature=1.0),  # brings no seed: not compared
    SamplingParams(max_tokens=12, temperature=2.0, top_k=50),
]


@pytest.mark.parametrize("slots", [2, 9])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_decides_whatever_the_neighbours(ends, policy, slots):
    """vllm#51226: beside an unseeded row the seed was ignored. mlx-lm PR#1225: when a request left, the next one's
    processors were skipped. Here rows of every sort come and go in shuffled order."""
    model, *_ = ends
    executor = executor_of(model)
    prompts = [[*PROMPT, i] for i in range(len(MIXED))]
    alone = [serve(executor, [p], m)[0].token_ids for p, m in zip(prompts, MIXED, strict=True)]
    order = random.Random(slots).sample(range(len(MIXED)), len(MIXED))
    done = serve(executor, [prompts[i] for i in order], [MIXED[i] for i in order], policy, slots)
    for i, completion in zip(order, done, strict=True):
        if MIXED[i].temperature == 0 or MIXED[i].seed is not None:
            assert completion.token_ids == alone[i]


def test_different_seeds_differ_and_numpys_integers_are_seeds(executor):
    seeds = [5, 6, np.int64(5), 2**40]
    done = serve(executor, [PROMPT] * 4, [SamplingParams(max_tokens=12, temperature=1, seed=s) for s in seeds])
    a, b, a_again, c = (c.token_ids for c in done)
    assert a == a_again and len({tuple(a), tuple(b), tuple(c)}) == 3


def test_the_engines_seed_makes_unseeded_requests_repeatable(executor):
    params = SamplingParams(max_tokens=10, temperature=1.5)

    def outputs(seed):
        done = serve(executor, [PROMPT] * 4, params, seed=seed)
        return [tuple(c.token_ids) for c in done]

    assert outputs(1) == outputs(1) != outputs(2)
    assert len(set(outputs(1))) == 4, "each request has a seed of its own"
    assert outputs(None) != outputs(None)


def test_numpys_numbers_are_numbers(executor):
    """A parameter that is checked and then refused by a processor in mid-step would take its neighbours down."""
    params = SamplingParams(
        max_tokens=np.int64(6),
        min_tokens=np.int32(2),
        temperature=np.float32(1),
        top_k=np.int64(5),
        top_p=np.float64(0.9),
        min_p=np.float32(0.01),
        repetition_penalty=np.int64(2),
        seed=np.uint8(3),
        stop_token_ids=np.array([95]),
        logprobs=np.int64(2),
    )
    plain = SamplingParams(
        max_tokens=6, min_tokens=2, temperature=1.0, top_k=5, top_p=0.9, min_p=float(np.float32(0.01)),
        repetition_penalty=2.0, seed=3, stop_token_ids=[95], logprobs=2,
    )  # fmt: skip
    a, b = serve(executor, [PROMPT] * 2, [params, plain])
    assert a.token_ids == b.token_ids
