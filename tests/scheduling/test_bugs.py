"""Bugs that other engines had, replayed: the input of the report, and the right result. Blocks hold four tokens.

Where ``tests/engine`` replays one already for ``static`` and ``orca`` and nothing about it depends on the policy, it is
only named here:

- nano-vllm PR#213, a chunk's keys end where the chunk ends:
  ``test_oracle.py::test_blocks_and_chunks_do_not_change_the_answer``
- vllm#7283, #7632, PR#7746, an empty prompt: ``test_bad_input.py::test_a_refused_request_leaves_no_trace`` and
  ``test_one_bad_prompt_of_many_is_named_and_none_is_served``
- nano-vllm PR#270, max_tokens 0, -1, 1.5 and 1: ``test_bad_input.py::test_sampling_values_out_of_range``,
  ``test_sampling.py::test_max_tokens_one_is_one_token_and_one_step``
- vllm#16445, lm-eval#2880, a prompt as long as the context: ``test_bad_input.py::test_the_edge_of_the_context``
- vllm#3574, TGI#1254, llama.cpp#9867, stop strings over several tokens: ``test_text.py``
- vllm#51226 / PR#51866, seeded beside unseeded rows, and mlx-lm PR#1225, state that follows the request:
  ``test_sampling.py::test_a_seed_decides_whatever_the_neighbours``,
  ``test_invariants.py::test_an_id_used_again_brings_nothing_along_from_its_first_owner``
- TensorRT-LLM PR#12358, vllm PR#15407, min_tokens:
  ``test_sampling.py::test_min_tokens_counts_outputs_and_holds_back_every_end``
- vllm#5898, #9567, #51187, greedy ids that depend on the batch: ``test_oracle.py``, and for all policies
  ``test_outputs.py`` here
"""

import pytest
from engine_support import Around, assert_at_rest, executor_of, greedy, reference, serve
from scheduling_support import Reading, finish, lengths, plans

from cbref import Engine, SamplingParams, Status
from cbref.executors.simulated import SimulatedExecutor
from cbref.schedulers import POLICIES

OPTIMISTIC = {  # the policies that may preempt, with what it takes
    "orca": {"admission": "optimistic"},
    "prefill_first": {},
    "sarathi_2023": {},
    "sarathi": {},
    "trtllm": {"capacity": "max_utilization"},
    "sglang": {},
}


def small_executor(kind, tiny, num_blocks):
    if kind == "scheduler":
        return Reading(num_blocks=num_blocks, block_size=4)
    return executor_of(tiny, num_blocks=num_blocks)


both = pytest.mark.parametrize("kind", ["scheduler", "model"])


def preempt(engine, request):
    """As if its blocks were wanted: between two steps, as ``schedule`` does it."""
    engine.scheduler.preempt(request, engine.executor.now())
    engine.audit()


# ---- memory


@both
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_can_never_fit_is_refused_and_its_neighbour_served(tiny, kind, policy):
    """vllm#113, #276, PR#273, and transformers' generate_batch: 8 blocks, prompts of 3 and 100 tokens; the queue hung,
    or both failed."""
    engine = Engine(small_executor(kind, tiny, 8), policy)
    solo = serve(small_executor(kind, tiny, 8), [[7, 8, 9]], greedy(6))[0].token_ids
    small = engine.add_request([7, 8, 9], greedy(6))
    with pytest.raises(ValueError, match=r"100 tokens \+ max_tokens 6 = 106, 27 KV blocks of 4.*whole pool has 8"):
        engine.add_request(range(100) if kind == "scheduler" else [5] * 100, greedy(6))
    finish(engine, 10)
    assert small.output == solo
    assert_at_rest(engine)


@both
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_that_is_in_the_cache_to_its_end_has_a_token_computed(tiny, kind, policy):
    """nano-vllm#144, #199, transformers PR#42094: a prompt of 8 tokens twice; the second time no query was left."""
    engine = Engine(small_executor(kind, tiny, 20), policy, prefix_caching=True)
    prompt = [11, 5, 70, 5, 23, 42, 8, 30]
    first, second = (engine.generate([prompt], greedy(6), progress=False)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    hit = next(plan[second.request_id] for plan in plans(engine) if second.request_id in plan)
    assert hit == (4, 8), "one block found, one computed again: its last token has to be"


@both
@pytest.mark.parametrize("policy", OPTIMISTIC)
def test_the_preempted_find_their_own_blocks_again(tiny, kind, policy):
    """nano-vllm#207, #211: after the hit, what was left to compute was counted as before it."""
    prompt, params = [11, 5, 70, 5, 23, 42, 8, 30, 12], greedy(12)
    undisturbed = serve(small_executor(kind, tiny, 20), [prompt], params)[0].token_ids
    engine = Engine(small_executor(kind, tiny, 20), policy, **{"prefix_caching": True, **OPTIMISTIC[policy]})
    request = engine.add_request(prompt, params)
    while len(request.output) < 5:
        engine.step()
    preempt(engine, request)
    assert (request.status, request.num_computed, engine.pool.table(request.id)) == (Status.WAITING, 0, [])
    engine.step()
    # 13 of 14 tokens were computed, three full blocks: two tokens are left, not fourteen and not one
    assert request.num_cached == 12 and plans(engine)[-1] == {request.id: (12, 14)}
    assert len(request.output) == 6
    finish(engine)
    assert request.output == undisturbed
    assert_at_rest(engine)


@pytest.mark.parametrize("kind", ["scheduler", "model"])
def test_the_keys_of_a_chunk_end_with_the_chunk(tiny, kind):
    """nano-vllm PR#213: prompt 10, budget 4; the first chunk took the prompt's end for its own."""
    prompt = [11, 5, 70, 5, 23, 42, 8, 30, 12, 3]
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=3 if kind == "model" else None)
    once = serve(small_executor(kind, tiny, 20), [prompt], params)[0]
    engine = Engine(small_executor(kind, tiny, 20), "sarathi", max_num_seqs=4, max_num_batched_tokens=4)
    done = engine.generate([prompt], params, progress=False)[0]
    assert [plan["0"] for plan in plans(engine)][:3] == [(0, 4), (4, 8), (8, 10)]
    assert done.token_ids == once.token_ids
    for a, b in zip(done.logprobs, once.logprobs, strict=True):
        assert list(a.top) == list(b.top) and a.top == pytest.approx(b.top, abs=1e-4)


@both
@pytest.mark.parametrize("policy", ["sarathi", "sarathi_2023", "sglang"])
def test_what_is_computed_again_is_no_decode(tiny, kind, policy):
    """tenstorrent/vllm-tt-plugin#52, FastDeploy#3080: prompt 6, preempted after 5 outputs, chunks of 4; what lies
    behind the prompt was replayed as if it were being decoded, and a token was sampled for each."""
    prompt = [11, 5, 70, 5, 23, 42]
    undisturbed = serve(small_executor(kind, tiny, 20), [prompt], greedy(9))[0].token_ids
    engine = Engine(small_executor(kind, tiny, 20), policy, chunk_size=4, prefix_caching=False)
    request = engine.add_request(prompt, greedy(9), "r")
    while len(request.output) < 5:
        engine.step()
    preempt(engine, request)
    before = engine.num_steps
    said = []
    while len(request.output) < 6:
        said.append([event.index for event in engine.step()])
    assert [plan["r"] for plan in plans(engine)[before:]] == [(0, 4), (4, 8), (8, 11)]
    assert said == [[], [], [5]]
    finish(engine)
    assert request.output == undisturbed


@pytest.mark.parametrize("policy", OPTIMISTIC)
def test_outputs_of_the_preempted_stay_outputs(tiny, policy):
    """vllm#5349 (discussion), vllm-metal#128 (review): what was said before the preemption became part of the prompt,
    and the presence penalty forgot it."""
    params = SamplingParams(max_tokens=30, presence_penalty=1.9, ignore_eos=True)
    undisturbed = serve(executor_of(tiny), [[4]], params)[0].token_ids
    assert undisturbed != serve(executor_of(tiny), [[4]], greedy(30))[0].token_ids, "the penalty does not matter here"
    engine = Engine(executor_of(tiny), policy, **OPTIMISTIC[policy])
    request = engine.add_request([4], params)
    for outputs in (3, 17):
        while len(request.output) < outputs:
            engine.step()
        preempt(engine, request)
    finish(engine)
    assert (request.output, request.prompt) == (undisturbed, [4])


@both
@pytest.mark.parametrize("policy", ["sarathi", "sarathi_2023", "sglang"])
def test_a_long_prompt_is_let_in_when_all_of_it_fits(tiny, kind, policy):
    """vllm#18115, PR#21809: let in for its first chunk alone, it was thrown out again and again before its last."""
    engine = Engine(small_executor(kind, tiny, 8), policy, max_num_seqs=3, chunk_size=4, prefix_caching=False)
    talkers = [engine.add_request([30 + i, 2, 3, 4], greedy(9), f"talker {i}") for i in range(2)]
    while not all(t.output for t in talkers):
        engine.step()
    long = engine.add_request(
        [5, 6, 7, 8] * 5, greedy(4), "long"
    )  # five blocks; the talkers hold two each, later three
    while engine.has_work:
        was_waiting, free = long.slot is None, engine.pool.num_free
        engine.step()
        engine.audit()
        if was_waiting and long.slot is not None:
            assert len(engine.pool.table("long")) == 5 <= free
    assert long.admitted >= min(t.finished for t in talkers), "let in beside both, for whom it would have to go again"
    assert long.preemptions <= 1 and all(t.preemptions == 0 for t in talkers)
    assert [len(r.output) for r in (*talkers, long)] == [9, 9, 4]
    assert engine.num_steps < 30
    if kind == "model":
        assert long.output == reference(tiny, [5, 6, 7, 8] * 5, 4)[0]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("policy", ["sarathi", "sarathi_2023", "sglang", "trtllm"])
@both
def test_every_chunk_goes_on_where_the_last_one_ended(tiny, kind, policy, caching):
    """sglang#36855, #33996: with nothing put into the prefix cache, each chunk began anew, in new blocks."""
    chunk = {"max_num_batched_tokens": 4, "chunked_context": True} if policy == "trtllm" else {"chunk_size": 4}
    engine = Engine(small_executor(kind, tiny, 6), policy, max_num_seqs=1, prefix_caching=caching, **chunk)
    prompt = list(range(40, 63))
    request = engine.add_request(prompt, greedy(2), "r")
    for done in (4, 8, 12, 16, 20, 23):
        engine.step()
        engine.audit()
        assert request.num_computed == done
        assert engine.pool.num_used <= 6 == -(-23 // 4)
    finish(engine)
    assert len(request.output) == 2 and engine.num_steps == 7
    assert_at_rest(engine)


# ---- aborts


class InMidStep(Around):
    """Calls ``then`` once, when the step has been computed and its result is not known yet."""

    then = None

    def execute(self, chunks, pool):
        answer = self._inner.execute(chunks, pool)
        if self.then:
            then, self.then = self.then, None
            then()
        return answer


@both
@pytest.mark.parametrize("when", ["prefill", "decode"])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_abort_between_launch_and_result(tiny, kind, when, policy):
    """mini-sglang#111, sglang#23392: blocks freed twice, and keys of one request in the blocks of another."""
    executor = InMidStep(small_executor(kind, tiny, 12))
    engine = Engine(executor, policy, max_num_seqs=3, prefix_caching=True)
    pool = engine.pool
    shared = [11, 5, 70, 5, 23, 42, 8, 30]
    prompts = [[*shared, 1], [*shared, 2], [*shared, 1]]
    solo = serve(small_executor(kind, tiny, 12), prompts, greedy(8), slots=1)
    victim, neighbour = (
        engine.add_request(p, greedy(8), n) for p, n in zip(prompts, ("victim", "neighbour"), strict=False)
    )
    if when == "decode":
        while len(victim.output) < 3:
            engine.step()
    said = list(victim.output)
    executor.then = lambda: engine.abort("victim")
    events = engine.step()
    engine.audit()
    assert victim.output == said and all(e.request_id != "victim" for e in events), "the late token was not dropped"
    assert (victim.status, victim.finish_reason) == (Status.FINISHED, "abort") and not engine.abort("victim")
    held = {b for name in pool.holders() for b in pool.table(name)}
    assert pool.num_free + len(held) == pool.num_blocks and "victim" not in pool.holders()
    again = engine.add_request(prompts[2], greedy(8), "victim")  # the same name and the same text
    finish(engine)
    assert [neighbour.output, again.output] == [solo[1].token_ids, solo[2].token_ids]
    assert_at_rest(engine)


# ---- time


def test_a_decode_gets_a_token_in_every_step_beside_a_long_prompt():
    """sglang#32549, FreeToken#483, nano-vllm: a prompt of 64 tokens, a budget of 16, and four steps without a token."""

    def tokens_beside_the_prompt(policy, **options):
        engine = Engine(SimulatedExecutor(num_blocks=99, block_size=4), policy, max_num_seqs=2, **options)
        engine.add_request([1, 2, 3, 4], greedy(40), "decode")
        engine.step()
        long = engine.add_request(range(100, 164), greedy(1), "long")
        while not long.output:
            engine.step()
        return [step.get("decode", 0) for step in lengths(engine)[1:]], [
            step.get("long", 0) for step in lengths(engine)[1:]
        ]

    assert tokens_beside_the_prompt("sarathi", max_num_batched_tokens=16) == ([1] * 5, [15, 15, 15, 15, 4])
    assert tokens_beside_the_prompt("vllm_v1", max_num_batched_tokens=16) == ([1] * 5, [15, 15, 15, 15, 4])
    assert tokens_beside_the_prompt("sarathi_2023", chunk_size=16) == ([1] * 4, [16] * 4)
    mixed = tokens_beside_the_prompt("sglang", max_num_batched_tokens=16, mixed_chunk=True)
    assert mixed == ([1] * 5, [15, 15, 15, 15, 4])
    assert tokens_beside_the_prompt("sglang", max_num_batched_tokens=16) == ([0] * 4, [16] * 4)
    assert tokens_beside_the_prompt("prefill_first") == ([0], [64])


# ---- content


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", [0, 3, 5])
def test_contents_of_equal_hash_are_told_apart(policy, where):
    """openvino.genai#3722: two blocks whose hashes collide, and one request read the keys of the other. Here the hashes
    collide because Python's hash of an integer is its remainder by 2**61 - 1."""
    twin = 2**61 - 1
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    other = [t + twin * (i == where) for i, t in enumerate(text)]
    assert text != other and hash(tuple(text)) == hash(tuple(other))
    engine = Engine(SimulatedExecutor(num_blocks=20, block_size=4), policy, prefix_caching=True)

    def cached(prompt):
        request = engine.add_request(prompt, greedy(1))
        finish(engine)
        return request.num_cached

    assert cached(text) == 0
    assert cached(other) == where // 4 * 4, "only blocks before the one that differs"
    assert (cached(text), cached(other)) == (8, 8)
    assert set(engine.pool.find_prefix(text)[where // 4 :]).isdisjoint(engine.pool.find_prefix(other)[where // 4 :])
