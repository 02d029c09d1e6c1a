"""What holds after every step of every trace, under every policy, and what is left when the last request is gone."""

import gc
import os
import time

import pytest
from engine_support import POLICIES, Around, Scripted, assert_at_rest, executor_of, greedy, reference
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cbref import Engine, SamplingParams, Status
from cbref.executors.simulated import SimulatedExecutor
from cbref.request import Sampled

END, WORD = 9, 1


class Watching(SimulatedExecutor):
    """Says for each request what the trace decided, and checks what it is asked to compute as a model would need it."""

    eos_token_ids = frozenset({END})

    def __init__(self, **options):
        super().__init__(**options)
        self.said = {}  # request id: words it says before it ends; an "error" takes the place of the end
        self.computed = {}  # request id: tokens whose keys and values are stored
        self.admitted = []
        self.abort = None  # called in mid-step

    def execute(self, chunks, pool):
        assert chunks, "a step without work"
        assert len({c.request.id for c in chunks}) == len(chunks), "two chunks of one request in one step"
        owners = {}
        for chunk in chunks:
            request, done = chunk.request, self.computed.setdefault(chunk.request.id, 0)
            if done == 0:
                self.admitted.append(request.id)
            assert chunk.start == done < chunk.stop <= len(request.prompt) + len(request.output)
            assert request.finish_reason is None, "computed after its end"
            table = pool.table(request.id)
            assert chunk.stop <= len(table) * pool.block_size, "no place for the chunk's last token"
            for block in table:
                assert 0 <= block < pool.num_blocks
                assert owners.setdefault(block, request.id) == request.id, f"block {block} has two owners"
            self.computed[request.id] = chunk.stop
        sampled = [self._answer(c.request) if c.yields_token else None for c in chunks]
        super().execute(chunks, pool)
        if self.abort:
            self.abort()
        return sampled

    def _answer(self, request):
        words, end = self.said[request.id]
        if len(request.output) < words:
            return Sampled(WORD)
        return Sampled(END) if end == "stop" else Sampled(WORD, error="broken")

    def release(self, request):
        del self.said[request.id]  # a second release would raise
        self.computed.pop(request.id, None)


class Trace(RuleBasedStateMachine):
    policy: str

    @initialize(slots=st.integers(1, 4), blocks=st.integers(1, 12), size=st.integers(1, 5))
    def start(self, slots, blocks, size):
        self.executor = Watching(num_blocks=blocks, block_size=size)
        self.engine = Engine(self.executor, self.policy, max_num_seqs=slots)
        self.slots, self.room = slots, blocks * size
        self.expected = {}  # request: (tokens, finish reason) if nobody aborts it
        self.arrivals = {}  # request: when, and as which of those that arrive then
        self.order = []  # ids as they were admitted
        self.events = {}  # request: tokens reported

    @rule(
        prompt=st.integers(1, 12),
        tokens=st.integers(1, 8),
        words=st.one_of(st.just(99), st.integers(0, 8)),
        end=st.sampled_from(["stop", "stop", "error"]),
        least=st.integers(0, 3),
        wait=st.sampled_from([None, None, 0.0, 0.5, 1.0, 2.5, 7.0]),
    )
    def add(self, prompt, tokens, words, end, least, wait):
        arrival = None if wait is None else self.executor.now() + wait
        params = SamplingParams(max_tokens=tokens, min_tokens=min(least, tokens))
        if prompt + tokens - 1 > self.room:
            with pytest.raises(ValueError, match="the whole pool"):
                self.engine.add_request([5] * prompt, params, arrival=arrival)
            return
        request = self.engine.add_request([5] * prompt, params, arrival=arrival)
        self.executor.said[request.id] = (words, end)
        if words >= tokens:
            self.expected[request] = (tokens, "length")
        elif end == "error":
            self.expected[request] = (words, "error")
        elif words + 1 >= params.min_tokens:
            self.expected[request] = (words + 1, "stop")
        else:  # this executor says END for ever; the first that is enough ends it
            self.expected[request] = (params.min_tokens, "stop")
        self.arrivals[request] = (self.executor.now() + (wait or 0.0), len(self.arrivals))
        self.events[request] = 0

    @precondition(lambda self: self.engine.has_work)
    @rule()
    def step(self):
        self.step_and_check()

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(data=st.data())
    def step_with_an_abort_in_mid_step(self, data):
        """mini-sglang#111: an abort between launch and result freed the blocks twice."""
        victim = data.draw(st.sampled_from(self.engine.scheduler.running))
        said, reason = list(victim.output), victim.finish_reason
        self.executor.abort = lambda: self.engine.abort(victim.id)
        try:
            self.step_and_check()
        finally:
            self.executor.abort = None
        assert victim.output == said, "a late token was not dropped"
        assert victim.finish_reason == (reason or "abort")

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data):
        """Waiting, running, still to arrive, done but held by a static batch, or gone."""
        request = data.draw(st.sampled_from(list(self.expected)[-8:]))
        was_alive, reason = request.status is not Status.FINISHED, request.finish_reason
        assert self.engine.abort(request.id) == was_alive
        assert request.status is Status.FINISHED and request.finish_reason == (reason or "abort")
        assert not self.engine.pool.table(request.id)

    def step_and_check(self):
        engine, executor = self.engine, self.executor
        had_work, before = engine.has_work, dict(executor.computed)
        live = {r.id: r for r in self.expected if r.status is not Status.FINISHED}
        now, steps = executor.now(), engine.num_steps
        executor.admitted = []
        queue = sorted((r for r in live.values() if r.id not in before), key=self.arrivals.get)
        events = engine.step()
        assert (engine.num_steps == steps + 1) == had_work, "a step makes progress or there is no work"
        if not had_work:
            assert (events, executor.now()) == ([], now)
            return
        for event in events:
            request = live[event.request_id]
            assert event.index == self.events[request]
            self.events[request] += 1
            assert event.token_id == request.output[event.index]
            assert event.finish_reason == request.finish_reason
        assert len({e.request_id for e in events}) == len(events), "a step makes at most one token of a request"
        assert executor.admitted == [r.id for r in queue[: len(executor.admitted)]], "not first come, first served"
        begin = engine.steps[-1].begin
        arrived = [r for r in queue if self.arrivals[r][0] <= begin]
        left_out = arrived[len(executor.admitted) :]
        ran = {s.request_id for s in engine.steps[-1].shares}
        assert begin >= now and (begin == now or not before), "the clock jumped although there was work"
        self.check_policy(before, executor.admitted, left_out, ran)

    def check_policy(self, before, admitted, left_out, ran):
        pass

    @invariant()
    def the_books_balance(self):
        engine, pool = self.engine, self.engine.pool
        engine.audit()
        tables = [pool.table(name) for name in pool.holders()]
        held = [block for table in tables for block in table]
        assert len(held) == len(set(held)) == pool.num_used == pool.num_blocks - pool.num_free
        assert set(pool.holders()) <= {r.id for r in engine.scheduler.running}
        assert len(engine.scheduler.running) <= self.slots
        assert engine.has_work == any(r.status is not Status.FINISHED for r in self.expected)
        for request, (tokens, reason) in self.expected.items():
            assert len(request.output) == self.events[request] == len(request.token_times) <= tokens
            if request.finish_reason not in (None, "abort"):
                assert (len(request.output), request.finish_reason) == (tokens, reason)
            if request.status is Status.FINISHED:
                assert request.finish_reason and request.finished <= self.executor.now()
            else:
                assert request.num_computed == self.executor.computed.get(request.id, 0)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        left = sum(len(r.prompt) + tokens for r, (tokens, _) in self.expected.items())
        for _ in range(left + 1):  # every step computes a token at least, unless the policy throws away
            if not self.engine.has_work:
                break
            self.step_and_check()
            self.the_books_balance()
        assert_at_rest(self.engine)
        assert not self.executor.said, "a request was not released"
        for request, (tokens, reason) in self.expected.items():
            assert request.finish_reason in (reason, "abort")
            done = self.engine.completion(request)
            if done.finish_reason != "abort":
                assert len(done.token_ids) == tokens
                assert self.arrivals[request][0] <= request.admitted < request.token_times[0] if tokens else True


class StaticTrace(Trace):
    def check_policy(self, before, admitted, left_out, ran):
        if before:
            assert not admitted, "somebody joined a batch that had begun"


class OrcaTrace(Trace):
    def check_policy(self, before, admitted, left_out, ran):
        assert set(before) <= ran, "a running request was not computed for"
        assert all(r.finish_reason is None for r in self.engine.scheduler.running), "done, and still there"
        if left_out:
            head = left_out[0]
            need = self.engine.pool.blocks_for(len(head.prompt) + head.params.max_tokens - 1)
            reserved = sum(
                self.engine.pool.blocks_for(len(r.prompt) + r.params.max_tokens - 1)
                for r in self.expected
                if r.id in ran
            )
            free = self.engine.pool.num_blocks - reserved
            assert len(ran) == self.slots or need > free, f"{head} was left out with {free} blocks free"


OWN_RULES = {"static": StaticTrace, "orca": OrcaTrace}


@pytest.mark.parametrize("policy", POLICIES)
def test_any_trace(policy):
    machine = type("Trace", (OWN_RULES.get(policy, Trace),), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=200, stateful_step_count=40))


# ---- streams that are left


@pytest.mark.parametrize("policy", POLICIES)
def test_leaving_a_stream_early_leaks_nothing(policy):
    engine = Engine.simulated(policy, max_batch_size=2, num_blocks=20)
    bystander = engine.add_request([1, 2], greedy(30))
    for event in engine.stream([range(5), range(9), range(3)], greedy(6)):
        if event.index == 2:
            break
    gc.collect()
    engine.audit()
    assert engine.has_work and len(engine.scheduler.running) + len(engine.scheduler.waiting) == 1
    while engine.has_work:
        engine.step()
    assert len(bystander.output) == 30
    assert_at_rest(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stream_that_nobody_starts_leaks_nothing(policy):
    engine = Engine.simulated(policy)
    stream = engine.stream([range(5)] * 3, greedy(6))
    del stream
    gc.collect()
    assert_at_rest(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stream_survives_the_abort_of_one_of_its_requests(policy):
    engine = Engine.simulated(policy, max_batch_size=3)
    counts = {}
    for event in engine.stream([range(5)] * 3, [greedy(4), greedy(9), greedy(6)]):
        counts[event.request_id] = counts.get(event.request_id, 0) + 1
        if event.request_id == "1" and event.index == 4:
            engine.abort("1")
    assert counts == {"0": 4, "1": 5, "2": 6}
    assert_at_rest(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_streams_read_in_turns_lose_nothing(policy):
    """Whoever steps the engine, another stream, ``generate`` or the caller, makes events for all."""
    engine = Engine.simulated(policy, max_batch_size=2)
    streams = [engine.stream([range(5)] * 2, greedy(n)) for n in (7, 4, 9)]
    counts = [0, 0, 0]
    while any(streams):
        for i, stream in enumerate(streams):
            if stream and next(stream, None) is None:
                streams[i] = None
            elif stream:
                counts[i] += 1
        if counts == [2, 2, 2]:
            assert len(engine.generate([range(3)], greedy(5), progress=False)[0].token_ids) == 5
            engine.step()
    assert counts == [14, 8, 18]
    assert_at_rest(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_id_that_is_taken_again_does_not_reach_the_old_stream(policy):
    engine = Engine.simulated(policy, max_batch_size=1)
    old = engine.stream([range(3)], greedy(2))
    first = next(old)
    while engine.has_work:
        engine.step()
    engine.add_request(range(3), greedy(6), first.request_id)
    while engine.has_work:
        engine.step()
    assert [event.finish_reason for event in old] == ["length"]
    assert_at_rest(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_when_the_last_that_runs_is_aborted_a_batch_is_over(policy):
    engine = Engine.simulated(policy, max_batch_size=2)
    short = engine.add_request(range(3), greedy(1))
    long = engine.add_request(range(3), greedy(9))
    next_one = engine.add_request(range(3), greedy(2))
    engine.step()
    engine.abort(long.id)
    while engine.has_work:
        engine.step()
    assert [r.finish_reason for r in (short, long, next_one)] == ["length", "abort", "length"]
    assert engine.num_steps == 3
    assert_at_rest(engine)


# ---- names


def test_an_id_is_taken_until_its_request_is_gone():
    engine = Engine.simulated("static", max_batch_size=2)
    engine.add_request([1], greedy(1), "a")
    later = engine.add_request([1], greedy(3), "b", arrival=99.0)
    for name in "ab":
        with pytest.raises(ValueError, match=f"'{name}' is being served"):
            engine.add_request([1], request_id=name)
    engine.step()
    again = engine.add_request([1, 2], greedy(2), "a")
    engine.abort("b")
    engine.add_request([1], greedy(1), "b")
    while engine.has_work:
        engine.step()
    assert (len(again.output), later.finish_reason) == (2, "abort")
    assert_at_rest(engine)


def test_given_and_drawn_ids_do_not_collide():
    engine = Engine.simulated()
    ids = [engine.add_request([1], request_id=name).id for name in ("1", None, None, "x", None)]
    assert len(set(ids)) == 5
    engine.generate([[1]] * 3, progress=False)
    assert_at_rest(engine)


def test_an_id_used_again_brings_nothing_along_from_its_first_owner(tiny):
    """mlx-lm PR#1225 in another guise: processors are kept by request id; those of an aborted request must be gone."""

    class AbortsInMidStep(Around):
        victim = None

        def execute(self, chunks, pool):
            answer = self._inner.execute(chunks, pool)
            if self.victim:
                engine.abort(self.victim)
            return answer

    executor = AbortsInMidStep(executor_of(tiny))
    engine = Engine(executor)
    penalised = SamplingParams(max_tokens=20, repetition_penalty=5.0, ignore_eos=True)
    engine.add_request([4, 5], penalised, "a")
    engine.step()
    executor.victim = "a"
    engine.step()
    executor.victim = None
    engine.audit()
    again = engine.add_request([4, 5], SamplingParams(20, presence_penalty=1e-6, ignore_eos=True), "a")
    while engine.has_work:
        engine.step()
    assert again.output == reference(tiny, [4, 5], 20)[0]
    assert_at_rest(engine)


# ---- time


def test_who_arrived_during_a_step_comes_before_who_arrives_after_it():
    engine = Engine.simulated(max_batch_size=1)
    engine.add_request([1], greedy(1), "running")
    engine.add_request([1], greedy(1), "during", arrival=0.5)
    engine.step()
    engine.add_request([1], greedy(1), "after")
    finished = [event.request_id for _ in range(2) for event in engine.step()]
    assert finished == ["during", "after"]


def test_the_clock_jumps_to_the_next_arrival_and_the_times_add_up():
    engine = Engine.simulated(step_time=0.25)
    done = {r.id: r for r in (engine.add_request([1], greedy(3), arrival=t) for t in (10.0, 2.0, 2.3))}
    while engine.has_work:
        engine.step()
    metrics = [engine.completion(r).metrics for r in done.values()]
    assert [m.ttft for m in metrics] == [0.25, 0.25, pytest.approx(0.45)]  # the third waits for the second's first step
    assert [m.queueing_delay for m in metrics] == [0, 0, pytest.approx(0.2)]
    assert [list(m.tbt) for m in metrics] == [[0.25, 0.25]] * 3
    assert [m.finished for m in metrics] == [10.75, 2.75, 3.25]


@pytest.mark.skipif("TQDM_DISABLE" in os.environ, reason="TQDM_DISABLE is set")
@pytest.mark.parametrize("progress", [True, False])
def test_a_long_call_shows_its_progress_in_tokens_unless_told_not_to(capsys, progress):
    class Slow(Scripted):
        def execute(self, chunks, pool):
            time.sleep(0.3)
            return super().execute(chunks, pool)

    engine = Engine(Slow({"0": [1] * 8 + [9]}))  # ends of its own accord, three tokens early
    engine.generate([[1], [1]], [SamplingParams(max_tokens=12), SamplingParams(max_tokens=5)], progress=progress)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("generate: 100%" in err and "14/14" in err) if progress else err == ""


def test_a_short_call_shows_none(capsys):
    Engine.simulated().generate([[1]] * 3, greedy(5))
    assert capsys.readouterr() == ("", "")
