"""What holds after every step of every trace, under every policy and whatever its options, in pools that are too small.

The model is ``Reading``: it finds out a key that was lost, overwritten or borrowed from the wrong request, and its
outputs are compared with those of each request alone.
"""

from collections import Counter

import pytest
from engine_support import assert_at_rest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduling_support import Reading, answer

from cbref import Engine, SamplingParams, Status
from cbref.schedulers import ADMISSIONS, ORDERS, POLICIES

STEMS = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 3, 3, 3, 3, 3, 3, 3], [7] * 10)


REQUESTS = st.tuples(
    st.builds(
        lambda stem, cut, tail: [*stem[:cut], *tail] or [5],
        st.sampled_from(STEMS),
        st.integers(0, 10),
        st.lists(st.integers(1, 3), max_size=3),
    ),
    st.builds(
        lambda most, least, ignore_eos: SamplingParams(most, min(least, most), ignore_eos=ignore_eos),
        st.integers(1, 10),
        st.integers(0, 3),
        st.booleans(),
    ),
    st.integers(0, 2),  # priority
    st.sampled_from([None, None, None, 0.5, 3.0]),  # time to arrival
)
CAPACITY = {"guaranteed_no_evict": "reserve", "max_utilization": "optimistic"}


@st.composite
def options_for(draw, policy):
    """Every combination of a policy's options that is allowed, small numbers."""
    slots = draw(st.sampled_from([1, 2, 3, 4, 4]))
    options = {
        "max_num_seqs": slots,
        "order": draw(st.sampled_from(list(ORDERS))),
        "prefix_caching": draw(st.booleans()),
    }
    chunked, hold = policy in ("sarathi_2023", "sarathi", "sglang"), policy == "static"
    if policy == "trtllm":
        hold = options["static_batch"] = draw(st.booleans())
        chunked = options["chunked_context"] = draw(st.booleans())
        options["capacity"] = "guaranteed_no_evict" if hold else draw(st.sampled_from(sorted(CAPACITY)))
    elif not hold:
        options["admission"] = draw(st.sampled_from(ADMISSIONS))
    if policy == "sglang":
        options["mixed_chunk"] = draw(st.booleans())
    if draw(st.booleans()):
        options["max_num_batched_tokens"] = slots + draw(st.integers(0, 8 if chunked else 16))
    if chunked and draw(st.booleans()):
        options["chunk_size"] = draw(st.integers(1, 5))
    return options


class Trace(RuleBasedStateMachine):
    policy: str
    seen: Counter

    @initialize(data=st.data(), blocks=st.integers(2, 10), size=st.integers(1, 4))
    def start(self, data, blocks, size):
        options = self.options = data.draw(options_for(self.policy), label="options")
        self.executor = Reading(breaks=True, num_blocks=blocks, block_size=size)
        self.executor.before = self.look_at_plan
        self.engine = Engine(self.executor, self.policy, **options)
        scheduler = self.engine.scheduler
        self.slots, self.room = options["max_num_seqs"], blocks * size
        self.budget, self.chunk_size = scheduler.max_num_batched_tokens, scheduler.chunk_size
        assert options.get("max_num_batched_tokens") in (None, self.budget)
        assert options.get("chunk_size") in (None, self.chunk_size)
        self.reserve = scheduler.admission == "reserve"
        self.hold = self.policy == "static" or options.get("static_batch", False)
        self.mixed = self.policy != "prefill_first" and options.get("mixed_chunk", self.policy != "sglang")
        self.chunked = self.policy in ("sarathi", "sarathi_2023", "sglang") or options.get("chunked_context", False)
        self.expected = {}  # request: (output, finish reason), unless somebody aborts it
        self.turn = {}  # request: (arrival, number)
        self.reported = {}  # request: tokens of its events
        self.decoding = set()  # requests that have said something since they were last admitted

    # ------------------------------------------------------------------ what may happen

    @rule(burst=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, burst):
        for prompt, params, priority, wait in burst:
            self.add_one(prompt, params, priority, None if wait is None else self.executor.now() + wait)

    def add_one(self, prompt, params, priority, arrival):
        longest = len(prompt) + params.max_tokens - 1
        why = None
        if longest > self.room:
            why = "the whole pool"
        elif not self.chunked and (len(prompt) if self.reserve else longest) > self.budget:
            why = "over max_num_batched_tokens"
        if why:
            with pytest.raises(ValueError, match=why):
                self.engine.add_request(prompt, params, priority=priority, arrival=arrival)
            return
        request = self.engine.add_request(prompt, params, priority=priority, arrival=arrival)
        self.expected[request] = answer(prompt, params, breaks=True)
        self.turn[request] = (request.arrival, len(self.turn))
        self.reported[request] = []

    @precondition(lambda self: self.engine.has_work)
    @rule(times=st.integers(1, 5))
    def step(self, times):
        for _ in range(times):
            self.step_and_check()

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def abort_in_mid_step(self, data):
        """mini-sglang#111: an abort between launch and result freed the blocks twice."""
        live = [*self.engine.scheduler.running, *self.engine.scheduler.waiting]
        victims = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=2, unique_by=lambda r: r.id))
        before = [(v, list(v.output), v.finish_reason) for v in victims]
        self.executor.after = lambda chunks: [self.engine.abort(v.id) for v in victims]
        try:
            self.step_and_check()
        finally:
            self.executor.after = None
        for victim, output, reason in before:
            assert (victim.output, victim.finish_reason) == (output, reason or "abort"), "a late token was not dropped"

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(list(self.expected)[-6:]))
        was_alive, reason = request.status is not Status.FINISHED, request.finish_reason
        assert self.engine.abort(request.id) == was_alive
        assert request.status is Status.FINISHED and request.finish_reason == (reason or "abort")
        assert not self.engine.pool.table(request.id)

    @precondition(lambda self: self.engine.has_work)
    @rule()
    def step_that_fails(self):
        """The executor breaks after it has written: nothing counts as computed, and the next step does it again."""

        def fail(chunks):
            raise RuntimeError("out of memory")

        before = {r: list(r.output) for r in self.expected}
        self.executor.after = fail
        try:
            with pytest.raises(RuntimeError, match="out of memory"):
                self.step_and_check()
        finally:
            self.executor.after = None
        assert before == {r: r.output for r in self.expected}

    # ------------------------------------------------------------------ what must hold in every step

    def step_and_check(self):
        engine, had_work = self.engine, self.engine.has_work
        steps, now = engine.num_steps, self.executor.now()
        self.was_running, self.preemptions = list(engine.scheduler.running), engine.scheduler.num_preemptions
        self.plan = None
        events = engine.step()
        assert (engine.num_steps == steps + 1) == had_work == (self.plan is not None), (
            "no progress although there is work"
        )
        assert had_work or (events, self.executor.now()) == ([], now)
        by_id = {r.id: r for r in self.expected if r.id in {e.request_id for e in events}}
        assert len(by_id) == len(events), "two tokens of one request in one step"
        for event in events:
            request = by_id[event.request_id]
            self.reported[request].append(event.token_id)
            self.decoding.add(request)
            assert event.index == len(self.reported[request]) - 1 and event.finish_reason == request.finish_reason

    def look_at_plan(self, chunks):
        """Between decision and computation. The model checks where chunks begin and into which blocks they go."""
        scheduler, pool = self.engine.scheduler, self.engine.pool
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        self.plan = chunks
        self.decoding &= set(running)
        chunk_of = {c.request: len(c) for c in chunks}
        preempted = [r for r in self.was_running if r.slot is None and r.status is Status.WAITING]
        self.seen["preemptions"] += len(preempted)
        self.decoding -= set(preempted)
        newcomers = [r for r in running if r not in self.was_running]
        self.seen["cached"] += sum(r.num_cached for r in newcomers)

        assert len(chunk_of) == len(chunks) and set(chunk_of) <= set(running)
        assert sum(chunk_of.values()) <= self.budget
        assert all(not r.done for r in chunk_of)
        prefills = [r for r in chunk_of if r not in self.decoding]
        decodes = [r for r in chunk_of if r in self.decoding]
        assert all(chunk_of[r] == 1 for r in decodes)
        assert all(chunk_of[r] <= self.chunk_size for r in prefills)
        if not self.chunked:
            assert all(chunk_of[r] == len(r.prompt) + len(r.output) - r.num_cached for r in prefills)
        may_decode = {r for r in running if r in self.decoding and not r.done}
        if self.mixed or not prefills:
            assert set(decodes) == may_decode, "a running decode got no token"
        else:
            assert not decodes, "a step that mixes"
        if prefills and not self.mixed:
            self.seen["stalls"] += len(may_decode)
        if self.policy == "sarathi_2023":
            assert len(prefills) <= 1

        assert scheduler.num_preemptions == self.preemptions + len(preempted)
        if self.reserve:
            assert not preempted and all(len(pool.table(r.id)) == self.blocks(r.max_len) for r in running)
        else:
            assert all(len(pool.table(r.id)) >= self.blocks(r.num_tokens) for r in running)
        if preempted:
            assert not newcomers, "admitted in a step that preempts"
        if self.hold and self.was_running:
            assert not newcomers, "somebody joined a batch that had begun"
        self.check_order(running, waiting, newcomers, preempted)

        # nobody waits who could come in
        if waiting and len(running) < self.slots and not preempted and not (self.hold and self.was_running):
            taking_part = [r for r in running if self.mixed or r not in self.decoding]
            spent = sum(min(r.num_tokens - r.num_computed, self.chunk_size) for r in taking_part if not r.done)
            assert spent >= self.budget or not self.fits(waiting[0]), f"{waiting[0]!r} was left out"

    def check_order(self, running, waiting, newcomers, preempted):
        order = self.options["order"]
        if order == "fcfs":
            line = [self.turn[r] for r in (*running, *waiting)]
            assert line == sorted(line), "one passed another"
        elif order in ("sjf", "priority"):
            key = {"sjf": lambda r: len(r.prompt) + r.params.max_tokens, "priority": lambda r: r.priority}[order]
            if newcomers and waiting:
                assert max(map(key, newcomers)) <= min(map(key, waiting)), "one passed another"
            if order == "priority" and preempted:
                assert min(map(key, preempted)) >= max(map(key, running)), "the wrong victim"

    def blocks(self, tokens):
        return -(-tokens // self.engine.pool.block_size)

    def fits(self, request):
        pool = self.engine.pool
        tokens = [*request.prompt, *request.output]
        prefix = pool.find_prefix(tokens) if self.options["prefix_caching"] else []
        room = request.max_len if self.reserve else len(tokens)
        idle = sum(pool.num_holders(b) == 0 for b in prefix)
        return self.blocks(room) - len(prefix) <= pool.num_free - idle

    @invariant()
    def the_books_balance(self):
        engine, pool = self.engine, self.engine.pool
        engine.audit()
        tables = {name: pool.table(name) for name in pool.holders()}
        held = Counter(block for table in tables.values() for block in table)
        assert pool.num_free + len(held) == pool.num_blocks and pool.num_used == len(held)
        assert all(pool.num_holders(b) == held[b] for b in range(pool.num_blocks))
        running = {r.id: r for r in engine.scheduler.running}
        assert set(tables) <= set(running) and len(running) <= self.slots
        for name, table in tables.items():
            for i, block in enumerate(table):
                full = (i + 1) * pool.block_size <= running[name].num_computed
                assert held[block] == 1 or full, f"block {block} is shared and {name} may still write into it"
        assert self.options["prefix_caching"] or all(n == 1 for n in held.values())
        for request, (output, reason) in self.expected.items():
            assert request.output == self.reported[request] == output[: len(request.output)]
            assert len(request.token_times) == len(request.output)
            if request.finish_reason not in (None, "abort"):
                assert (request.output, request.finish_reason) == (output, reason)
        alive = [r for r in self.expected if r.status is not Status.FINISHED]
        assert engine.has_work == bool(alive)

    def teardown(self):
        """Nobody starves: whatever is there comes to its end, in a number of steps that the tokens bound."""
        if not hasattr(self, "expected"):
            return
        alive = [r for r in self.expected if r.status is not Status.FINISHED]
        most = (len(alive) + 1) * sum(len(r.prompt) + r.params.max_tokens for r in alive)
        for _ in range(most):
            if not self.engine.has_work:
                break
            self.step_and_check()
            self.the_books_balance()
        assert_at_rest(self.engine)
        assert sorted(self.executor.released) == sorted(r.id for r in self.expected), "released once each"
        for request, (output, reason) in self.expected.items():
            assert request.finish_reason in (reason, "abort")
            assert request.finish_reason == "abort" or request.output == output
            assert request.preemptions == 0 or not self.reserve
        self.seen["finished"] += len(self.expected)


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "vllm_v1"])
def test_any_trace(policy):
    seen = Counter()
    machine = type("Trace", (Trace,), {"policy": policy, "seen": seen})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=120,
            stateful_step_count=20,
            suppress_health_check=list(HealthCheck),
            phases=set(Phase) - {Phase.explain},  # takes minutes where every example is a trace
        ),
    )
    assert seen["finished"] and seen["cached"], seen  # the trace has been where it hurts
    assert policy == "static" or seen["preemptions"], seen
