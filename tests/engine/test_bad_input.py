"""What cannot be served is refused with the value and the limit, and what goes wrong later stays with one request."""

import math
import re

import numpy as np
import pytest
import torch
from engine_support import POLICIES, Around, Scripted, assert_at_rest, executor_of, greedy, reference, serve, tiny_model
from transformers import AutoModelForCausalLM

from cbref import Engine, SamplingParams, Status, load_model
from cbref.request import Sampled

# ---- sampling parameters


@pytest.mark.parametrize(
    ("name", "values", "limit"),
    [
        ("max_tokens", [0, -1, 1.5, "8", True, None, math.nan], "at least 1"),  # nano-vllm PR#270
        ("min_tokens", [-1, 2.0, "1", False], "at least 0"),
        ("min_tokens", [17], "max_tokens, 16"),
        ("temperature", [-0.1, math.nan, math.inf, "hot", None, True], "at least 0"),
        ("top_k", [-1, 2.5, "all"], "at least 0"),
        ("top_p", [0, -0.5, 1.01, math.nan, "all"], "above 0 and at most 1"),
        ("min_p", [-0.01, 1.01, math.nan], "at least 0 and at most 1"),
        ("repetition_penalty", [0, -1, math.inf, math.nan], "above 0"),
        ("presence_penalty", [-2.01, 2.01, math.nan], "at least -2 and at most 2"),
        ("frequency_penalty", [-2.01, 2.01, math.nan], "at least -2 and at most 2"),
        ("seed", [-1, 1.0, "x"], "at least 0"),
        ("seed", [2**63], r"below 2\*\*63"),
        ("logprobs", [-1, 1.5, True], "at least 0"),
        ("stop", [""], "non-empty"),
        ("stop", [["a", ""], [1]], "non-empty"),
        ("stop", [7, None], "list"),
        ("stop_token_ids", [7, None], "list"),
    ],
)
def test_sampling_values_out_of_range(name, values, limit):
    for value in values:
        with pytest.raises(ValueError, match=f"{name}.*{limit}") as error:
            SamplingParams(**{name: value})
        assert repr(value) in str(error.value)


def test_stop_token_ids_are_ids():
    for value in (-1, 1.5, "x"):
        with pytest.raises(ValueError, match=rf"stop token id is {re.escape(repr(value))}.*at least 0"):
            SamplingParams(stop_token_ids=[3, value])


def test_the_edges_of_the_ranges_are_allowed():
    SamplingParams(max_tokens=1, min_tokens=1, temperature=0, top_p=1, min_p=1, top_k=0, seed=2**63 - 1, logprobs=0)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, min_p=0, seed=0, stop="x", stop_token_ids=[0])


# ---- prompts: refused at add_request, and nobody else notices


@pytest.fixture(scope="module")
def model():
    return tiny_model(eos_token_id=95)


@pytest.fixture(scope="module")
def executor(model):
    """A context of 256 tokens and a pool of 20 blocks of 4: the pool is the tighter limit."""
    return executor_of(model, num_blocks=20)


REFUSED = [
    ([], {}, "prompt is empty"),  # vllm#7283, #7632: it crashed the batch, or returned a neighbour's token
    ((), {}, "prompt is empty"),
    (np.array([], int), {}, "prompt is empty"),
    (None, {}, "prompt is None.*text"),
    (5, {}, "prompt is 5.*text"),
    ({"role": "user", "content": "hi"}, {}, "prompt is {'role'.*list of chat messages"),
    ("text", {}, "'text'.*no tokenizer"),
    ([{"role": "user", "content": "hi"}], {}, "'hi'.*no tokenizer"),
    ([1, -1], {}, "prompt holds -1.*at least 0"),
    ([1, 96], {}, "prompt holds 96.*size, 96"),
    (range(90, 97), {}, "prompt holds 96.*size, 96"),
    (range(3, -3, -1), {}, "prompt holds -2.*at least 0"),
    ([1, 2.0], {}, r"prompt holds 2\.0.*integers"),
    ([True, 2], {}, "prompt holds True.*integers"),
    ([1, "2"], {}, "prompt holds '2'.*integers"),
    ([[1, 2]], {}, r"prompt holds \[1, 2\].*integers"),
    ([1], {"params": {"max_tokens": 3}}, "params is {'max_tokens': 3}.*SamplingParams"),
    ([1], {"request_id": "first"}, "'first' is being served"),
    ([1], {"arrival": math.nan}, "arrival is nan.*finite"),
    ([1], {"arrival": math.inf}, "arrival is inf.*finite"),
    ([1] * 241, {}, r"241 tokens \+ max_tokens 16 = 257.*context of 256"),
    ([1] * 66, {}, r"66 tokens \+ max_tokens 16 = 82, 21 KV blocks of 4.*pool has 20"),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_refused_request_leaves_no_trace(model, executor, policy):
    """vllm#113: the request that could never fit blocked the queue, or took the one that could along."""
    neighbours = [[7, 8, 9], [30] * 12]
    engine = Engine(executor, policy, seed=1, max_num_seqs=2)
    requests = [engine.add_request(neighbours[i], greedy(25), name) for i, name in enumerate(("first", "second"))]
    for prompt, options, message in REFUSED:
        free = engine.pool.num_free
        with pytest.raises(ValueError, match=message):
            engine.add_request(prompt, **options)
        engine.audit()
        assert engine.pool.num_free == free
        engine.step()
    while engine.has_work:
        engine.step()
    for prompt, request in zip(neighbours, requests, strict=True):
        assert request.output == reference(model, prompt, 25)[0]
    assert_at_rest(engine)


def test_one_bad_prompt_of_many_is_named_and_none_is_served(executor):
    engine = Engine(executor)
    before = engine.add_request([4], greedy(3))
    for run in (engine.generate, lambda *a: list(engine.stream(*a))):
        with pytest.raises(ValueError, match="prompt 2: prompt is empty"):
            run([[1], [2], [], [3]], greedy(3))
        engine.audit()
        assert engine.num_steps == 0 and list(engine.scheduler.waiting) == [before]


def test_prompts_and_params_that_do_not_pair_up(executor):
    engine = Engine(executor)
    with pytest.raises(ValueError, match="2 params for 3 prompts"):
        engine.generate([[1], [2], [3]], [greedy(1)] * 2)
    with pytest.raises(ValueError, match=r"'one prompt'.*list of prompts"):
        engine.generate("one prompt")
    assert engine.generate([]) == [] == list(engine.stream([]))
    assert_at_rest(engine)


def test_a_tokenizers_own_complaint_leaves_no_trace_either(smollm_executor):
    engine = Engine(smollm_executor)
    with pytest.raises(Exception, match="role"):
        engine.generate(["fine", [{"rolle": "user", "content": "a message with a spelling mistake"}]])
    with pytest.raises(ValueError, match="prompt 1: prompt is empty"):
        engine.generate(["fine", ""])
    assert_at_rest(engine)


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_edge_of_the_context(model, over):
    """vllm#16445, lm-eval#2880: a prompt as long as the context was let in, with no room for a token."""
    roomy = executor_of(model, num_blocks=65)
    for length, max_tokens in ((255 + over, 1), (200 + over, 56), (1, 255 + over)):
        prompt = [(7 * i) % 90 for i in range(length)]
        if over > 0:
            with pytest.raises(ValueError, match=f"{length + max_tokens}, over the model's context of 256"):
                Engine(roomy).add_request(prompt, greedy(max_tokens))
        else:
            [done] = serve(roomy, [prompt], greedy(max_tokens))
            assert len(done.token_ids) == max_tokens
            if max_tokens < 100:
                assert done.token_ids == reference(model, prompt, max_tokens)[0]


@pytest.mark.parametrize("over", [-1, 0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_edge_of_the_pool(model, executor, policy, over):
    """The last token of an output is returned and never stored: 80 places hold 81 tokens."""
    for length, max_tokens in ((80 + over, 1), (41 + over, 40)):
        prompt = [(7 * i) % 90 for i in range(length)]
        if over > 0:
            with pytest.raises(ValueError, match=r"21 KV blocks of 4.*pool has 20"):
                Engine(executor, policy).add_request(prompt, greedy(max_tokens))
        else:
            small = [3, 4, 5]
            both = serve(executor, [prompt, small], [greedy(max_tokens), greedy(5)], policy)
            assert [c.token_ids for c in both] == [
                reference(model, p, n)[0] for p, n in ((prompt, max_tokens), (small, 5))
            ]


def test_max_model_len_shortens_the_context(model):
    executor = executor_of(model, max_model_len=10)
    with pytest.raises(ValueError, match="= 11, over the model's context of 10"):
        Engine(executor).add_request([1] * 8, greedy(3))
    assert len(serve(executor, [[1] * 8], greedy(2))[0].token_ids) == 2


# ---- construction


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "num_blocks is 0.*at least 1"),
        ({"num_blocks": -5}, "num_blocks is -5.*at least 1"),
        ({"num_blocks": 1.5}, r"num_blocks is 1\.5.*integer"),
        ({"block_size": 0}, "block_size is 0.*at least 1"),
        ({"block_size": "16"}, "block_size is '16'.*integer"),
        ({"block_size": None}, "block_size is None.*integer"),
        ({"max_model_len": 1}, "max_model_len is 1.*2 to 256"),
        ({"max_model_len": 257}, "max_model_len is 257.*2 to 256"),
        ({"max_model_len": "long"}, "max_model_len is 'long'.*integer"),
        ({"attention": "flash"}, "attention 'flash'.*torch.*function"),
    ],
)
def test_executors_that_cannot_be_built(model, options, message):
    with pytest.raises(ValueError, match=message):
        executor_of(model, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "magic"}, "policy 'magic'.*static, orca"),
        ({"max_batch_size": 0}, "is 0.*at least 1"),
        ({"max_batch_size": 2.5}, r"is 2\.5.*integer"),
        ({"num_blocks": 0}, "num_blocks is 0.*at least 1"),
        ({"block_size": -1}, "block_size is -1.*at least 1"),
        ({"step_time": 0}, "step_time is 0.*above 0"),
        ({"step_time": math.nan}, "step_time is nan.*above 0"),
    ],
)
def test_simulations_that_cannot_be_built(options, message):
    with pytest.raises(ValueError, match=message):
        Engine.simulated(**options)


def test_engines_that_cannot_be_built(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"policy 'magic'.*static, orca"):  # before a model is loaded
        Engine.from_pretrained("no model of this name", policy="magic")
    for dtype in ("float8", "int32", torch.int8, 7):
        with pytest.raises(ValueError, match=rf"dtype is .*{re.escape(str(dtype))}.*float32, bfloat16 or float16"):
            load_model(dtype=dtype)
    for name in ("", None, 7):
        with pytest.raises(ValueError, match=f"model is {name!r}"):
            load_model(name)
    for name in (str(tmp_path), str(tmp_path / "nowhere"), "./nowhere", "~/no/where"):
        with pytest.raises(FileNotFoundError, match=re.escape(repr(name)) + r".*config\.json"):
            load_model(name)

    def no_such_model(*_, **__):  # as without a network, without the half minute that the hub's client tries for
        raise OSError("We couldn't connect")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", no_such_model)
    with pytest.raises(FileNotFoundError, match=r"no model 'nobody/nothing'.*smollm2-135m.*couldn't connect"):
        load_model("nobody/nothing")


def test_a_scheduler_serves_one_engine(executor):
    engine = Engine(executor, "orca")
    with pytest.raises(ValueError, match="already serves an engine"):
        Engine(executor, engine.scheduler)
    with pytest.raises(ValueError, match=r"max_num_seqs.*OrcaScheduler"):
        Engine.simulated(engine.scheduler, max_batch_size=3)


# ---- what goes wrong later


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_that_is_not_finite_ends_alone(policy):
    """Token 13 has an embedding of NaN. Whoever reads it ends with an error; its neighbours, and who gets its blocks
    next, answer as without it. The attention reads whole blocks, as kernels do: one NaN left behind would spread."""
    from test_oracle import dense_attention

    model = tiny_model()
    prompts = [[7, 8, 9], [5, 13, 6, 7, 2], [30] * 9, [44, 2], [13], [1, 2, 3, 4, 5, 6]]
    expected = [reference(model, p, 8)[0] for p in prompts]
    model.get_input_embeddings().weight.data[13] = torch.nan
    params = [greedy(8)] * 6
    params[1] = params[2] = SamplingParams(8, temperature=1, top_p=0.9, seed=5, ignore_eos=True)
    healthy = serve(executor_of(model), [prompts[2]], params[2])[0].token_ids
    done = serve(executor_of(model, num_blocks=12, attention=dense_attention), prompts, params, policy, slots=3)
    for i, (prompt, completion) in enumerate(zip(prompts, done, strict=True)):
        if 13 in prompt:
            assert (completion.finish_reason, completion.token_ids) == ("error", [])
            assert "not finite" in completion.error
        else:
            assert completion.token_ids == (healthy if i == 2 else expected[i])
            assert completion.error is None


def test_an_error_in_the_middle_of_an_output_keeps_what_was_said():
    engine = Engine(Scripted({"bad": [4, 5, Sampled(0, error="broken")]}), "static", max_num_seqs=2)
    bad = engine.add_request([1, 2], greedy(9), "bad")
    good = engine.add_request([1, 2], greedy(5), "good")
    while engine.has_work:
        engine.step()
        engine.audit()
    assert (bad.output, bad.finish_reason, bad.error) == ([4, 5], "error", "broken")
    assert (good.output, good.finish_reason) == ([1] * 5, "length")
    assert engine.completion(bad).error == "broken"
    assert_at_rest(engine)


class Failing(Around):
    fail = True

    def execute(self, chunks, pool):
        answer = self._inner.execute(chunks, pool)
        if self.fail:
            raise RuntimeError("out of memory")
        return answer


@pytest.mark.parametrize("policy", POLICIES)
def test_an_executor_that_fails_in_mid_step_can_be_tried_again(model, executor, policy):
    failing = Failing(executor)
    engine = Engine(failing, policy, max_num_seqs=2)
    prompts = [[7, 8, 9], [30] * 9, [4]]
    requests = [engine.add_request(p, greedy(4)) for p in prompts]
    while engine.has_work:
        failing.fail = not failing.fail
        before = [(r.num_computed, list(r.output)) for r in requests]
        if failing.fail:
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.step()
            assert before == [(r.num_computed, list(r.output)) for r in requests]
        else:
            engine.step()
        engine.audit()
    assert [r.output for r in requests] == [reference(model, p, 4)[0] for p in prompts]
    assert_at_rest(engine)


def test_generate_that_fails_takes_its_requests_along(executor):
    engine = Engine(Failing(executor))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate([[1], [2]], greedy(4), progress=False)
    assert_at_rest(engine)


def test_a_scheduler_that_plans_nothing_is_told_so():
    from cbref import Scheduler

    class Idle(Scheduler):
        def compose(self):
            return []

    engine = Engine(Scripted(), Idle())
    engine.add_request([1])
    with pytest.raises(RuntimeError, match="Idle planned nothing; 1 requests run and 0 wait"):
        engine.step()


def test_a_status_moves_only_where_it_may():
    request = Engine.simulated().add_request([1])
    with pytest.raises(RuntimeError, match="'0' cannot go from waiting to decode"):
        request.move(Status.DECODE, 0.0)


def test_an_answer_is_given_when_there_is_one(executor):
    engine = Engine(executor)
    request = engine.add_request([1], greedy(3))
    with pytest.raises(ValueError, match="not finished"):
        engine.completion(request)
    assert engine.abort(request.id) and not engine.abort(request.id) and not engine.abort("nobody")
    assert engine.completion(request).finish_reason == "abort"
    assert_at_rest(engine)
