"""Small schedules, worked out by hand, that tell the policies apart; orders, victims, options, and the prefix cache."""

import dataclasses
import inspect

import pytest
from engine_support import Scripted, assert_at_rest, greedy
from scheduling_support import Reading, finish, keys_of, lengths, plans, said

from cbref import Engine, Scheduler
from cbref.executors.simulated import SimulatedExecutor
from cbref.kv_cache import BlockPool
from cbref.request import Sampled
from cbref.schedulers import ORDERS, POLICIES, make_scheduler, options_of

PLENTY = {"num_blocks": 100, "block_size": 4}


def prompts_of(jobs):
    """Made-up prompts of the given lengths that share no token."""
    return {name: range(100 * i, 100 * i + length) for i, (name, (length, *_)) in enumerate(jobs.items())}


def schedule(policy, jobs, pool=PLENTY, **options):
    """Serve ``{name: (prompt tokens, output tokens)}``, all there at the start, and return the engine."""
    engine = Engine(SimulatedExecutor(**pool), policy, **options)
    for name, prompt in prompts_of(jobs).items():
        engine.add_request(prompt, greedy(jobs[name][1]), name)
    finish(engine)
    assert_at_rest(engine)
    return engine


# ---- one schedule for each policy. A step is what each request gets in it, in tokens.

JOBS = {"a": (4, 4), "b": (6, 2), "c": (3, 2)}  # prompt, output


@pytest.mark.parametrize(
    ("policy", "options", "steps"),
    [
        (
            "static",  # c waits for the whole batch
            {"max_num_seqs": 2},
            [{"a": 4, "b": 6}, {"a": 1, "b": 1}, {"a": 1}, {"a": 1}, {"c": 3}, {"c": 1}],
        ),
        (
            "orca",  # c takes b's place at once, and its whole prompt rides beside a
            {"max_num_seqs": 2},
            [{"a": 4, "b": 6}, {"a": 1, "b": 1}, {"a": 1, "c": 3}, {"a": 1, "c": 1}],
        ),
        (
            "prefill_first",  # a stands still while c's prompt is computed
            {"max_num_seqs": 2},
            [{"a": 4, "b": 6}, {"a": 1, "b": 1}, {"c": 3}, {"a": 1, "c": 1}, {"a": 1}],
        ),
        (
            "sarathi_2023",  # one chunk of one prompt, although three slots are there
            {"max_num_seqs": 3, "chunk_size": 4},
            [{"a": 4}, {"a": 1, "b": 4}, {"a": 1, "b": 2}, {"a": 1, "b": 1, "c": 3}, {"c": 1}],
        ),
        (
            "sarathi",  # decodes, then as much of any prompts as the budget holds
            {"max_num_seqs": 3, "max_num_batched_tokens": 8},
            [{"a": 4, "b": 4}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 1, "c": 1}, {"a": 1}],
        ),
        (
            "sarathi",  # the limit of a chunk holds for each prompt, the budget for all
            {"max_num_seqs": 3, "max_num_batched_tokens": 8, "chunk_size": 3},
            [{"a": 3, "b": 3, "c": 2}, {"a": 1, "b": 3, "c": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 1}, {"a": 1}],
        ),
        (
            "trtllm",  # whole prompts under a budget: b does not fit beside a
            {"max_num_seqs": 3, "max_num_batched_tokens": 9},
            [{"a": 4}, {"a": 1, "b": 6}, {"a": 1, "b": 1, "c": 3}, {"a": 1, "c": 1}],
        ),
        (
            "trtllm",
            {"max_num_seqs": 3, "max_num_batched_tokens": 9, "chunked_context": True},
            [{"a": 4, "b": 5}, {"a": 1, "b": 1, "c": 3}, {"a": 1, "b": 1, "c": 1}, {"a": 1}],
        ),
        (
            "sglang",  # chunks of the budget, and no decode before the last of them
            {"max_num_seqs": 3, "max_num_batched_tokens": 4},
            [{"a": 4}, {"b": 4}, {"b": 2, "c": 2}, {"c": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 1}, {"a": 1}],
        ),
        (
            "sglang",
            {"max_num_seqs": 3, "max_num_batched_tokens": 4, "mixed_chunk": True},
            [{"a": 4}, {"a": 1, "b": 3}, {"a": 1, "b": 3}, {"a": 1, "b": 1, "c": 2}, {"c": 1}, {"c": 1}],
        ),
    ],
)
def test_schedules(policy, options, steps):
    assert lengths(schedule(policy, JOBS, **options)) == steps


def test_tensorrt_llms_toy():
    """Its guide to tuning max batch size and max num tokens: batch 4, 12 tokens, and two prompts of 5 leave 2."""
    jobs = dict.fromkeys("abcde", (5, 3))
    toy = {"max_num_seqs": 4, "max_num_batched_tokens": 12}
    whole = lengths(schedule("trtllm", jobs, **toy))
    assert whole[:3] == [{"a": 5, "b": 5}, {"a": 1, "b": 1, "c": 5, "d": 5}, dict.fromkeys("abcd", 1)]
    assert whole[3:] == [{"c": 1, "d": 1, "e": 5}, {"e": 1}, {"e": 1}]
    chunked = lengths(schedule("trtllm", jobs, chunked_context=True, **toy))
    assert chunked[:2] == [{"a": 5, "b": 5, "c": 2}, {"a": 1, "b": 1, "c": 3, "d": 5}]


def test_a_prompt_as_long_as_the_budget_waits_for_the_decodes_and_nobody_passes_it():
    jobs = {"a": (2, 4), "big": (6, 2), "small": (1, 1)}
    steps = lengths(schedule("trtllm", jobs, max_num_seqs=3, max_num_batched_tokens=6))
    assert steps == [{"a": 2}, {"a": 1}, {"a": 1}, {"a": 1}, {"big": 6}, {"big": 1, "small": 1}]


def test_static_batch_is_static_and_vllm_v1_is_sarathi():
    jobs = {str(i): (1 + i * 5 % 11, 1 + i * 7 % 5) for i in range(14)}
    static = plans(schedule("static", jobs, max_num_seqs=3))
    assert static == plans(schedule("trtllm", jobs, max_num_seqs=3, static_batch=True))
    assert static != plans(schedule("trtllm", jobs, max_num_seqs=3))
    tight = {"max_num_seqs": 3, "max_num_batched_tokens": 14}
    assert plans(schedule("static", jobs, **tight)) == plans(schedule("trtllm", jobs, static_batch=True, **tight))
    assert POLICIES["vllm_v1"] is POLICIES["sarathi"]


def test_capacity_of_tensorrt_llm():
    """Ten blocks, two requests that end with seven each: one rule lets one in, the other both, and pauses one."""
    jobs = {"a": (8, 21), "b": (8, 21)}
    pool = {"num_blocks": 10, "block_size": 4}
    cautious = schedule("trtllm", jobs, pool, max_num_seqs=2)
    assert all(len(step) == 1 for step in plans(cautious)) and cautious.scheduler.num_preemptions == 0
    bold = schedule("trtllm", jobs, pool, max_num_seqs=2, capacity="max_utilization")
    assert plans(bold)[0] == {"a": (0, 8), "b": (0, 8)} and bold.scheduler.num_preemptions == 1
    assert bold.num_steps < cautious.num_steps
    # 20 tokens each fill the ten blocks, after 13 steps; then b stands back until a is done, and catches up in one step
    assert plans(bold)[12] == {"a": (19, 20), "b": (19, 20)}
    assert plans(bold)[13:21] == [{"a": (n, n + 1)} for n in range(20, 28)]
    assert plans(bold)[21] == {"b": (0, 21)}


# ---- who comes first


def first_steps(engine):
    """Ids in the order in which they were first computed for."""
    return list(dict.fromkeys(name for step in plans(engine) for name in step))


def serve_in_order(order, jobs, policy="orca", slots=1, arrivals=None, **options):
    """``{name: (prompt, output tokens, priority)}``."""
    engine = Engine(SimulatedExecutor(**PLENTY), policy, order=order, max_num_seqs=slots, **options)
    for name, (prompt, tokens, priority) in jobs.items():
        engine.add_request(prompt, greedy(tokens), name, priority, (arrivals or {}).get(name))
    finish(engine)
    return first_steps(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_orders(policy):
    jobs = {
        "long": (range(100, 109), 3, 5),
        "short": (range(200, 202), 2, 5),
        "talker": (range(300, 302), 40, -1),
        "alike": (range(400, 402), 2, 5),
        "urgent": (range(500, 506), 9, -1),
    }
    assert serve_in_order("fcfs", jobs, policy) == ["long", "short", "talker", "alike", "urgent"]
    assert serve_in_order("sjf", jobs, policy) == ["short", "alike", "long", "urgent", "talker"]
    assert serve_in_order("priority", jobs, policy) == ["talker", "urgent", "long", "short", "alike"]
    assert serve_in_order("lpm", jobs, policy) == ["long", "short", "talker", "alike", "urgent"], (
        "no prefix: as they came"
    )


def test_who_is_there_first_runs_although_shorter_jobs_are_on_their_way():
    jobs = {"long": (range(9), 3, 0), "short": (range(2), 2, 0), "shortest": (range(1), 1, 0)}
    assert serve_in_order("sjf", jobs, arrivals={"short": 1.0, "shortest": 2.0}) == ["long", "shortest", "short"]


@pytest.mark.parametrize("policy", POLICIES)
def test_longest_prefix_first(policy):
    """The first fills the cache; then those come first whose beginning is in it, most of it first."""
    text = list(range(1, 20))
    jobs = {
        "first": (text[:17], 1, 0),  # four full blocks of four
        "stranger": ([99] * 17, 1, 0),
        "one": ([*text[:4], 99, 99], 1, 0),
        "three": ([*text[:12], 99], 1, 0),
        "whole": (text[:16], 1, 0),  # its last token has to be computed: three blocks, as many as "three"
        "none": (text[:3], 1, 0),
    }
    order = serve_in_order("lpm", jobs, policy, prefix_caching=True)
    assert order == ["first", "three", "whole", "one", "stranger", "none"]


# ---- who has to go


def preempted(engine):
    """Serve to the end and say who was preempted, in this order."""
    victims, preempt = [], engine.scheduler.preempt
    engine.scheduler.preempt = lambda request, now: (victims.append(request.id), preempt(request, now))
    finish(engine)
    assert_at_rest(engine)
    return victims


OPTIMISTIC = {
    "orca": {"admission": "optimistic"},
    "prefill_first": {},
    "sarathi_2023": {},
    "sarathi": {},
    "trtllm": {"capacity": "max_utilization"},
    "sglang": {},
}


@pytest.mark.parametrize("policy", OPTIMISTIC)
def test_the_last_admitted_goes_first_and_comes_back_in_order(policy):
    """Four blocks, three prompts of one. With the first token a and b take another: c goes; with the fifth b does."""
    engine = Engine(SimulatedExecutor(num_blocks=4, block_size=4), policy, max_num_seqs=3, **OPTIMISTIC[policy])
    a, b, c = (engine.add_request(range(i, i + 4), greedy(9), n) for i, n in ((10, "a"), (20, "b"), (30, "c")))
    assert preempted(engine)[:2] == ["c", "b"]
    assert a.preemptions == 0 and b.preemptions and c.preemptions
    assert a.finished < b.finished < c.finished
    assert [len(r.output) for r in (a, b, c)] == [9, 9, 9]
    assert engine.scheduler.num_preemptions == sum(r.preemptions for r in (a, b, c))


@pytest.mark.parametrize(
    ("priorities", "victims"),
    [
        ({"a": 5, "b": 0, "c": 1}, ["a", "c"]),  # the first to come is the least important
        ({"a": 0, "b": 7, "c": 7}, ["c", "b"]),  # among equals the last
        ({"a": 1, "b": 1, "c": 0}, ["b", "a"]),
        ({"a": 3, "b": 3, "c": 3}, ["c", "b"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("policy", OPTIMISTIC)
def test_the_least_important_goes_first(policy, priorities, victims):
    options = OPTIMISTIC[policy] | {"order": "priority", "prefix_caching": False}
    engine = Engine(SimulatedExecutor(num_blocks=5, block_size=4), policy, max_num_seqs=3, **options)
    everyone = {}
    for i, (name, priority) in enumerate(priorities.items()):  # admitted in this order: they come one by one
        everyone[name] = engine.add_request(range(10 * i, 10 * i + 4), greedy(13), name, priority)
        engine.step()
    assert list(dict.fromkeys(preempted(engine)))[:2] == victims
    best = (set(priorities) - set(victims)).pop()
    assert everyone[best].preemptions == 0 and all(len(r.output) == 13 for r in everyone.values())


def test_nobody_comes_in_by_a_step_that_pushed_somebody_out():
    """vLLM's rule. In the step in which b has to go, a slot and a block become free that small could have."""
    engine = Engine(SimulatedExecutor(num_blocks=4, block_size=4), "sarathi", max_num_seqs=2, order="priority")
    a, b = (engine.add_request(range(10 * i, 10 * i + 4), greedy(9), priority=i) for i in (1, 3))
    for _ in range(5):
        engine.step()
    small = engine.add_request([1], greedy(1), priority=2)
    engine.step()  # a takes a third block, of the two that b had
    assert (b.preemptions, engine.pool.num_free, small.admitted) == (1, 1, None)
    engine.step()
    assert (b.slot, small.admitted) == (None, 6.0)
    finish(engine)
    assert [len(r.output) for r in (a, b, small)] == [9, 9, 1]


# ---- options


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("magic", {}, "unknown policy 'magic'; choose one of static, orca, prefill_first, sarathi_2023, sarathi"),
        ("orca", {"max_batch_size": 3}, "policy 'orca' has no option max_batch_size; it has max_num_seqs"),
        ("orca", {"mixed_chunk": True}, "policy 'orca' has no option mixed_chunk; it has .*prefix_caching"),
        (
            "sarathi",
            {"budget": 3, "chunk": 1},
            "has no option budget, chunk; it has .*max_num_batched_tokens, .*chunk_size",
        ),
        ("trtllm", {"admission": "reserve"}, "admission is 'reserve', but capacity decides"),
        ("trtllm", {"capacity": "all"}, "capacity 'all'; choose one of guaranteed_no_evict, max_utilization"),
        ("sarathi", {"order": "random"}, "unknown order 'random'; choose one of fcfs, sjf, priority, lpm"),
        ("sarathi", {"admission": "never"}, "unknown admission 'never'; choose one of reserve, optimistic"),
        ("sarathi", {"max_num_seqs": 0}, "max_num_seqs is 0.*at least 1"),
        ("sarathi", {"max_num_batched_tokens": 1.5}, r"max_num_batched_tokens is 1\.5.*at least 1"),
        ("sarathi", {"max_num_batched_tokens": True}, "max_num_batched_tokens is True.*integer"),
        ("sarathi", {"chunk_size": -1}, "chunk_size is -1.*at least 1"),
        (
            "sarathi",
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            "max_num_batched_tokens is 8, below max_num_seqs, 9",
        ),
        ("orca", {"chunk_size": 8}, "chunk_size is 8, but this policy does not cut prompts"),
        ("prefill_first", {"chunk_size": 8}, "does not cut prompts"),
        ("trtllm", {"chunk_size": 8}, "does not cut prompts"),
        ("static", {"admission": "optimistic"}, "'optimistic', but a batch that is held together"),
        ("trtllm", {"static_batch": True, "capacity": "max_utilization"}, "'optimistic', but a batch that is held"),
    ],
)
def test_wrong_options_are_refused_with_the_right_ones(policy, options, message):
    with pytest.raises(ValueError, match=message):
        make_scheduler(policy, **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_option_that_is_named_is_taken(policy):
    assert set(options_of(Scheduler)) - set(options_of(POLICIES[policy])) == set()
    for name in options_of(POLICIES[policy]):
        value = {"order": "sjf", "admission": "reserve", "capacity": "max_utilization"}.get(name, True)
        if name in ("max_num_seqs", "max_num_batched_tokens", "chunk_size"):
            value = 64
        if (policy, name) in {("trtllm", "admission")} or (name == "chunk_size" and not POLICIES[policy].chunked):
            continue
        make_scheduler(policy, **{name: value})


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize(("policy", "options"), [("orca", {}), ("trtllm", {}), ("static", {}), ("prefill_first", {})])
def test_a_prompt_that_is_not_cut_must_fit_into_the_budget(policy, options, over):
    """Under optimistic admission the output counts too: after a preemption it is computed again in one piece."""
    engine = Engine(SimulatedExecutor(**PLENTY), policy, max_num_seqs=4, max_num_batched_tokens=10, **options)
    for prompt, tokens in ((10 + over, 1), *([(6 + over, 5)] if policy == "prefill_first" else [])):
        if over:
            with pytest.raises(ValueError, match=r"11 tokens may.*max_num_batched_tokens, 10; raise it, or.*cuts"):
                engine.add_request(range(prompt), greedy(tokens))
            assert not engine.has_work
        else:
            assert engine.generate([range(prompt)], greedy(tokens), progress=False)[0].finish_reason == "length"
    chunked = Engine(SimulatedExecutor(**PLENTY), "sarathi", max_num_seqs=4, max_num_batched_tokens=10)
    assert len(chunked.generate([range(99)], greedy(30), progress=False)[0].token_ids) == 30


def test_a_policy_is_a_small_diff():
    files = {inspect.getsourcefile(policy) for policy in POLICIES.values()}
    assert len(files) == 6
    for file in files:
        with open(file, encoding="utf-8") as source:
            assert len(source.readlines()) <= 70, file
    assert all(policy.__mro__[1] is Scheduler for policy in POLICIES.values()), "no policy is built on another"


class Shortest(Scheduler):
    """What a reader may write: the shortest prompt of those that run has its chunk first."""

    chunked = True

    def line_up(self):
        return sorted(super().line_up(), key=lambda r: r.missing)


def test_a_policy_of_ones_own():
    engine = schedule(Shortest(max_num_seqs=3, max_num_batched_tokens=6), {"a": (5, 2), "b": (3, 3), "c": (4, 1)})
    assert lengths(engine) == [{"b": 3, "a": 3}, {"b": 1, "a": 2, "c": 3}, {"a": 1, "b": 1, "c": 1}]


class Faulty(Scheduler):
    """Right until there are two that run; then it does one thing wrong."""

    chunked = True

    def __init__(self, fault):
        super().__init__(max_num_seqs=2, max_num_batched_tokens=6)
        self.fault = fault

    def compose(self):
        chunks = super().compose()
        return self.fault(self, chunks) if len(chunks) > 1 else chunks


def with_last(chunks, **changes):
    return [*chunks[:-1], dataclasses.replace(chunks[-1], **changes)]


def without_blocks(scheduler, chunks):
    scheduler.pool.release(chunks[-1].request.id)
    return chunks


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda s, c: with_last(c, stop=c[-1].stop + 2), r"Faulty planned 8 tokens.*over max_num_batched_tokens, 6"),
        (lambda s, c: [*c, c[-1]], "Faulty planned request 'b' twice in one step"),
        (lambda s, c: with_last(c, start=1), r"Faulty planned tokens 1:5 of .*'b'.*stands \(0\)"),
        (lambda s, c: with_last(c, stop=0), "Faulty planned tokens 0:0 of .*'b'"),
        (lambda s, c: with_last(c, stop=99), "Faulty planned tokens 0:99 of .*'b'.*ends at 9 at the latest"),
        (without_blocks, "Faulty planned tokens up to 5 of .*'b'.*blocks for 0"),
        (lambda s, c: with_last(c, request=s.waiting[0]), "Faulty planned .*'c'.*, which is not running"),
    ],
)
def test_a_faulty_policy_is_told_what_it_did_wrong(fault, message):
    executor = Reading(**PLENTY)
    engine = Engine(executor, Faulty(fault))
    for name, prompt in (("a", 1), ("b", 9), ("c", 9)):
        engine.add_request(range(prompt), greedy(4), name)
    executor.before = lambda chunks: pytest.fail("it was executed")
    with pytest.raises(RuntimeError, match=message):
        engine.step()


# ---- the prefix cache


def serve_one(engine, prompt, tokens=1):
    request = engine.add_request(prompt, greedy(tokens))
    finish(engine)
    return request


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", range(1, 14))
def test_at_least_one_token_is_always_computed(policy, length):
    engine = Engine(Reading(num_blocks=20, block_size=4), policy, prefix_caching=True)
    prompt = list(range(50, 50 + length))
    first, second = serve_one(engine, prompt), serve_one(engine, prompt)
    cached = (length - 1) // 4 * 4
    assert (first.num_cached, second.num_cached) == (0, cached) and cached < length
    assert plans(engine)[-1] == {second.id: (cached, length)}
    assert second.output == first.output


def test_without_prefix_caching_nothing_is_found_again():
    engine = Engine(Reading(num_blocks=20, block_size=4), "sarathi")
    assert [serve_one(engine, range(9)).num_cached for _ in range(3)] == [0, 0, 0]
    assert POLICIES["sglang"]().prefix_caching and not any(
        POLICIES[p]().prefix_caching for p in set(POLICIES) - {"sglang"}
    )


def test_outputs_are_found_again_as_well_as_prompts():
    """The next turn of a chat begins with the last one's answer."""
    engine = Engine(Reading(num_blocks=20, block_size=4), "sarathi", prefix_caching=True)
    first = serve_one(engine, range(40, 45), tokens=8)
    second = serve_one(engine, [*range(40, 45), *first.output, 77])
    assert second.num_cached == (5 + len(first.output) - 1) // 4 * 4 >= 8


def test_what_was_used_longest_ago_is_given_up_first():
    engine = Engine(Reading(num_blocks=4, block_size=4), "sarathi", prefix_caching=True)

    def kept():
        return "".join(name for name, prompt in asked.items() if engine.pool.find_prefix(prompt))

    asked = {name: [i] * 5 for i, name in enumerate("xyz", start=1)}
    for name in asked:
        serve_one(engine, asked[name])  # each leaves one full block behind
    assert kept() == "xyz"
    assert serve_one(engine, asked["x"]).num_cached == 4  # so that y is the oldest now
    serve_one(engine, [8] * 8)  # one block is free, two are wanted
    assert kept() == "xz"
    serve_one(engine, [9] * 16)
    assert kept() == ""


def test_the_end_of_a_prefix_goes_before_its_beginning():
    """A block is of no use to anyone once the one before it is gone."""
    engine = Engine(Reading(num_blocks=5, block_size=4), "sarathi", prefix_caching=True)
    text = list(range(60, 77))
    serve_one(engine, text)
    assert len(engine.pool.find_prefix(text)) == 4
    for size, left in ((8, 3), (4, 2), (3, 1), (2, 1)):
        serve_one(engine, [size] * size)
        assert len(engine.pool.find_prefix(text)) == left


def test_a_block_in_use_is_not_given_up_and_one_that_was_idle_is_not_counted_twice():
    """Four blocks: two idle ones are the prefix of a request that needs four. They are free, but only once."""
    engine = Engine(Reading(num_blocks=4, block_size=4), "orca", prefix_caching=True, max_num_seqs=2)
    text = list(range(30, 39))
    serve_one(engine, text)
    assert engine.pool.num_free == 4
    holder = engine.add_request([1], greedy(6), "holder")  # two blocks, reserved: the two that are not idle
    engine.step()
    again = engine.add_request([*text, 2], greedy(5), "again")  # 14 tokens: four blocks, of which two are there
    engine.step()
    assert (again.slot, engine.pool.num_free) == (None, 2)
    finish(engine)
    assert again.num_cached == 8 and holder.finished < again.token_times[0]


def test_two_that_run_share_what_the_first_has_computed():
    engine = Engine(Reading(num_blocks=20, block_size=4), "sarathi", prefix_caching=True)
    text = list(range(30, 42))
    first = engine.add_request([*text, 1], greedy(6, min_tokens=6), "first")
    engine.step()
    second = engine.add_request([*text, 2], greedy(6), "second")
    engine.step()
    engine.audit()
    tables = [engine.pool.table(r.id) for r in (first, second)]
    assert tables[0][:3] == tables[1][:3] and not set(tables[0][3:]) & set(tables[1][3:])
    assert [engine.pool.num_holders(b) for b in tables[0][:3]] == [2, 2, 2]
    assert sorted(engine.pool.holders(tables[0][0])) == ["first", "second"]
    assert engine.pool.num_used == len({*tables[0], *tables[1]})
    engine.abort("first")  # what both hold stays
    engine.audit()
    assert engine.pool.table("second") == tables[1]
    finish(engine)
    assert_at_rest(engine)


def test_twins_that_come_together_are_both_computed_and_kept_once():
    engine = Engine(Reading(num_blocks=20, block_size=4), "orca", prefix_caching=True)
    twins = [engine.add_request(range(9), greedy(4)) for _ in range(2)]
    finish(engine)
    assert [t.num_cached for t in twins] == [0, 0] and twins[0].output == twins[1].output
    assert len(engine.pool.find_prefix(range(9))) == 2
    assert serve_one(engine, range(9)).num_cached == 8


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_broken_request_has_computed_is_not_found_again(policy):
    """Reading breaks as a model does whose logits are not finite; ``forget`` is the executor's part of it."""
    executor = Reading(breaks=True, num_blocks=9, block_size=4)
    text = next(t for t in ([9] * 8 + [i] for i in range(500)) if said(keys_of(t)[-1], breaks=True) is None)
    chunk = {"chunk_size": 4} if POLICIES[policy].chunked else {}  # so that two blocks are published before it breaks
    engine = Engine(executor, policy, prefix_caching=True, **chunk)
    broken = serve_one(engine, text)
    assert (broken.finish_reason, broken.error) == ("error", "broken")
    assert engine.pool.find_prefix([*text, 1]) == [] and not executor.places
    sound = serve_one(engine, [9] * 7)
    assert (sound.num_cached, sound.error) == (0, None)
    assert_at_rest(engine)


def test_a_block_that_ends_with_the_error_is_not_published_even_without_forget():
    """An executor that knows nothing of prefixes, a reader's for instance, spoils nothing either."""
    engine = Engine(
        Scripted({"bad": [Sampled(0, error="broken")]}, num_blocks=9, block_size=4), "sarathi", prefix_caching=True
    )
    engine.add_request(range(4), greedy(3), "bad")
    finish(engine)
    assert engine.pool.find_prefix(range(5)) == []
    engine.add_request(range(4), greedy(3), "good")
    finish(engine)
    assert len(engine.pool.find_prefix(range(5))) == 1


@pytest.mark.parametrize("policy", ["static", "trtllm"])
def test_a_batch_that_is_held_goes_on_without_the_one_that_broke(policy):
    """It stays in its place until the batch is done, has said nothing, and must not stop the prompts behind it."""
    options = {"static_batch": True} if policy == "trtllm" else {}
    executor = Scripted({"bad": [Sampled(0, error="broken")]}, num_blocks=9, block_size=4)
    engine = Engine(executor, policy, max_num_seqs=3, max_num_batched_tokens=9, **options)
    for i, (name, prompt) in enumerate({"bad": 7, "good": 1, "late": 5}.items()):
        engine.add_request(range(10 * i, 10 * i + prompt), greedy(2), name)
    finish(engine)
    assert lengths(engine) == [{"bad": 7, "good": 1}, {"good": 1, "late": 5}, {"late": 1}]
    assert_at_rest(engine)


def test_what_one_of_two_spoils_the_other_keeps():
    engine = Engine(Reading(num_blocks=9, block_size=4), "sarathi", prefix_caching=True)
    pool: BlockPool = engine.pool
    text = list(range(30, 38))
    first = engine.add_request([*text, 1], greedy(9, min_tokens=9), "first")
    engine.step()
    engine.add_request([*text, 2], greedy(9, min_tokens=9), "second")
    engine.step()
    alone = pool.forget("second")
    assert set(alone) == set(pool.table("second")) - set(pool.table("first"))
    engine.audit()
    assert pool.find_prefix([*text, 3]) == []
    finish(engine)
    assert first.error or len(first.output) == 9
    assert_at_rest(engine)


def test_the_orders_are_those_of_the_documentation():
    assert list(ORDERS) == ["fcfs", "sjf", "priority", "lpm"]
