"""Speculative decoding: the same tokens in fewer steps."""

import pytest
from engine_support import assert_at_rest, executor_of, greedy, prompts_of, reference, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from cbref import Engine, SamplingParams
from cbref.request import Request, Sampled
from cbref.schedulers import POLICIES
from cbref.speculation import NgramDrafter, verify


class Oracle(NgramDrafter):
    """Guesses right for ``right`` tokens, then wrong: it knows the answers."""

    def __init__(self, answers, right, length=4):
        super().__init__(length)
        self.answers, self.right = answers, right

    def propose(self, request, limit):
        made = len(request.output)
        guess = self.answers.get(request.id, [])[made : made + min(limit, self.length)]
        return tuple(token if i < self.right else (token + 1) % 90 for i, token in enumerate(guess))


@pytest.fixture(scope="module")
def tiny():
    return tiny_model()


def answers_of(model, prompts, n):
    return {str(i): reference(model, p, n)[0] for i, p in enumerate(prompts)}


@pytest.mark.parametrize("right", range(5))
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_right_and_wrong_guesses_leave_the_output_as_it_is(tiny, policy, right):
    prompts = prompts_of([3, 9, 1, 17, 5])
    answers = answers_of(tiny, prompts, 11)
    engine = Engine(executor_of(tiny), policy, max_num_seqs=3, drafter=Oracle(answers, right))
    done = engine.generate(prompts, greedy(11), progress=False)
    assert [c.token_ids for c in done] == list(answers.values())
    assert engine.totals.drafted > 0
    kept = engine.totals.accepted / engine.totals.drafted
    # The end of a block may cut a guess before it goes wrong.
    assert (kept == 0) if right == 0 else (kept == 1) if right == 4 else (0 < kept <= (1 if right == 3 else 0.9))
    assert_at_rest(engine)


def test_right_guesses_save_steps(tiny):
    prompts = prompts_of([3])
    answers = answers_of(tiny, prompts, 11)
    engine = Engine(executor_of(tiny), drafter=Oracle(answers, 4))
    engine.generate(prompts, greedy(11), progress=False)
    assert engine.num_steps == 1 + 2  # the prompt yields one token, then five and five


def test_the_draft_is_found_in_the_text_of_the_real_model(smollm_executor):
    prompt = "Repeat after me: one two three four five six seven. one two three four five six seven. one two three"
    plain = Engine(smollm_executor)
    expected = plain.generate([prompt], greedy(24), progress=False)[0].token_ids
    engine = Engine(smollm_executor, drafter=NgramDrafter(4))
    assert engine.generate([prompt], greedy(24), progress=False)[0].token_ids == expected
    assert engine.num_steps < plain.num_steps == 24
    assert engine.summary([])["acceptance"] > 0.3


def test_useless_guesses_cost_nobody_memory(tiny):
    """Wrong guesses, a pool that is too small for all: as many steps and preemptions as without guesses."""
    prompts = prompts_of([6, 6, 6])
    answers = answers_of(tiny, prompts, 9)

    def run(drafter):
        engine = Engine(
            executor_of(tiny, num_blocks=9), "orca", max_num_seqs=3, admission="optimistic", drafter=drafter
        )
        done = engine.generate(prompts, greedy(9), progress=False)
        assert [c.token_ids for c in done] == list(answers.values())
        return engine.num_steps, sum(c.metrics.preemptions for c in done), engine.totals.drafted

    plain, useless = run(None), run(Oracle(answers, 0))
    assert useless[:2] == plain[:2] and plain[1] > 0 and useless[2] > 0


@pytest.mark.parametrize("admission", ["reserve", "optimistic"])
def test_in_a_tight_pool_guesses_take_nobodys_memory(tiny, admission):
    prompts = prompts_of([6, 6, 6, 6])
    answers = answers_of(tiny, prompts, 14)
    executor = executor_of(tiny, num_blocks=11, block_size=2)
    engine = Engine(executor, "orca", max_num_seqs=4, admission=admission, drafter=Oracle(answers, 2))
    for prompt in prompts:
        engine.add_request(prompt, greedy(14))
    done = {}
    while engine.has_work:
        for event in engine.step():
            done.setdefault(event.request_id, []).append(event.token_id)
        engine.audit()
    assert done == answers


def test_guesses_keep_to_the_budget_of_a_step(tiny):
    prompts = prompts_of([3, 4, 5])
    answers = answers_of(tiny, prompts, 10)
    engine = Engine(executor_of(tiny), "sarathi", max_num_seqs=3, max_num_batched_tokens=6, drafter=Oracle(answers, 4))
    done = engine.generate(prompts, greedy(10), progress=False)
    assert [c.token_ids for c in done] == list(answers.values())
    assert max(step.num_tokens for step in engine.steps) <= 6 and engine.totals.accepted


def test_an_end_in_the_middle_of_kept_guesses_is_the_end(tiny):
    prompts = prompts_of([3])
    answers = answers_of(tiny, prompts, 11)
    end = answers["0"][4]
    first = answers["0"].index(end)
    engine = Engine(executor_of(tiny), drafter=Oracle(answers, 4))
    params = SamplingParams(max_tokens=11, stop_token_ids=[end], ignore_eos=True)
    [done] = engine.generate(prompts, params, progress=False)
    assert done.token_ids == answers["0"][: first + 1] and done.finish_reason == "stop"


@pytest.mark.parametrize(
    "params", [{"temperature": 0.7, "seed": 1}, {"repetition_penalty": 1.2}, {"logprobs": 1}, {"min_tokens": 3}]
)
def test_requests_that_choose_otherwise_get_no_guesses(tiny, params):
    prompts = prompts_of([5, 5])
    wanted = SamplingParams(max_tokens=8, **params)
    expected = [c.token_ids for c in Engine(executor_of(tiny)).generate(prompts, wanted, progress=False)]
    engine = Engine(executor_of(tiny), drafter=Oracle({"0": [1] * 8, "1": [1] * 8}, 4))
    assert [c.token_ids for c in engine.generate(prompts, wanted, progress=False)] == expected
    assert engine.totals.drafted == 0


def test_published_blocks_hold_only_what_was_kept(tiny):
    """With prefix caching, a block with a wrong guess in it must not be found again."""
    prompts = prompts_of([7])
    answers = answers_of(tiny, prompts, 12)
    engine = Engine(executor_of(tiny), "sglang", drafter=Oracle(answers, 1))
    first = engine.generate(prompts, greedy(12), progress=False)[0]
    longer = [*prompts[0], *first.token_ids, 5]
    again = engine.generate([longer], greedy(6), progress=False)[0]
    assert again.token_ids == reference(tiny, longer, 6)[0]


# ---- the drafter


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(0, 6), st.integers(1, 4))
def test_a_guess_is_what_once_followed_the_same_tokens(tokens, limit, ngram):
    guess = NgramDrafter(length=4, ngram=ngram).propose(Request("r", tokens, SamplingParams()), limit)
    assert len(guess) <= min(limit, 4)
    if guess:
        n = len(guess)
        assert any(
            tuple(tokens[i : i + n]) == guess and tokens[i - 1] == tokens[-1] for i in range(1, len(tokens) - n + 1)
        )


def test_a_longer_match_wins_over_a_later_one():
    request = Request("r", [1, 2, 3, 7, 3, 8, 1, 2, 3], SamplingParams())
    assert NgramDrafter(length=2, ngram=3).propose(request, 9) == (7, 3)
    assert NgramDrafter(length=2, ngram=1).propose(request, 9) == (8, 1)


def test_an_answer_counts_as_long_as_the_guess_before_it_was_right():
    said = [Sampled(t) for t in (4, 5, 6)]
    assert verify((4, 9), said).following == (Sampled(5),)
    assert verify((4, 5), said).following == (Sampled(5), Sampled(6))
    assert verify((9, 5), said).following == ()
    assert verify((), said[:1]) == said[0]
    broken = [Sampled(4), Sampled(5, error="not finite"), Sampled(6)]
    assert verify((4, 5), broken).following == (broken[1],)


@pytest.mark.parametrize("options", [{"length": 0}, {"length": 2.0}, {"ngram": 1, "shortest": 2}, {"shortest": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="must be an integer of at least"):
        NgramDrafter(**options)
