"""A reader's own policy works in both executors; a faulty one is stopped with the reason."""

import pytest

from cbref import Chunk, Engine, SamplingParams, Scheduler
from cbref.schedulers import StaticScheduler


class ShortestFirst(Scheduler):
    """A reader's policy: at most two prompts a step, the shortest of the queue first."""

    def admit(self, now):
        self.waiting = type(self.waiting)(sorted(self.waiting, key=lambda r: len(r.prompt)))
        super().admit(now)

    def line_up(self):
        everyone = super().line_up()
        prompts = [r for r in everyone if not r.output]
        return [r for r in everyone if r.output] + prompts[:2]


def params(n=4):
    return SamplingParams(max_tokens=n, ignore_eos=True)


def test_on_the_simulator():
    engine = Engine.simulated(ShortestFirst(max_num_seqs=3))
    requests = [engine.add_request(range(n), params()) for n in (9, 3, 5, 7)]
    while engine.has_work:
        engine.step()
        engine.audit()
    assert [s.request_id for s in engine.steps[0].shares] == ["1", "2"]
    assert all(len(r.output) == 4 for r in requests)


def test_on_a_real_model(model):
    from cbref.executors.model import ModelExecutor

    executor = ModelExecutor(model, num_blocks=64, block_size=4)
    prompts = [[5, 6, 7, 8, 9], [1, 2], [3, 4, 5, 6]]
    own = Engine(executor, ShortestFirst(max_num_seqs=2)).generate(prompts, params())
    assert [c.token_ids for c in own] == [c.token_ids for c in Engine(executor, "orca").generate(prompts, params())]


@pytest.fixture
def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


class Faulty(Scheduler):
    """Does as the base does, and then something else."""

    def compose(self):
        return self.spoil(super().compose())


class Twice(Faulty):
    def spoil(self, chunks):
        return chunks + chunks[:1]


class PastTheEnd(Faulty):
    def spoil(self, chunks):
        return [Chunk(c.request, c.start, c.stop + 1) for c in chunks]


class Skipping(Faulty):
    def spoil(self, chunks):
        return [Chunk(c.request, c.start + 1, c.stop) for c in chunks]


class NoBlocks(Faulty):
    def spoil(self, chunks):
        for c in chunks:
            self.pool.release(c.request.id)
        return chunks


class NotAdmitted(Faulty):
    def spoil(self, chunks):
        return chunks + [Chunk(r, 0, 1) for r in self.waiting]


class PastTheBudget(Faulty):
    def spoil(self, chunks):
        self.max_num_batched_tokens = 4
        return chunks


class TooMany(Faulty):
    def spoil(self, chunks):
        self.max_num_seqs = 1
        return chunks


class Forgetful(Scheduler):
    def compose(self):
        return []


class KeepsTheDone(StaticScheduler):
    def line_up(self):
        return self.running


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (Twice, r"Twice planned request '0' twice"),
        (PastTheEnd, r"PastTheEnd planned tokens 0:4 .*ends at 3"),
        (Skipping, r"Skipping planned tokens 1:3 .*begins where computation stands \(0\)"),
        (NoBlocks, r"NoBlocks planned tokens up to 3 .*has blocks for 0; .*pool.grow"),
        (NotAdmitted, r"NotAdmitted planned Request\('2', waiting.*admit it first"),
        (PastTheBudget, r"PastTheBudget planned 6 tokens .*max_num_batched_tokens, 4"),
        (TooMany, r"TooMany planned 2 requests, over max_num_seqs, 1"),
        (Forgetful, r"Forgetful planned nothing; 2 requests run and 1 wait"),
        (KeepsTheDone, r"KeepsTheDone planned Request\('0'.*retire it when done"),
    ],
)
def test_a_faulty_scheduler_is_told_what_it_did_wrong(scheduler, words):
    engine = Engine.simulated(scheduler(max_num_seqs=2))
    for n in (1, 5, 5):
        engine.add_request(range(3), params(n))
    with pytest.raises(RuntimeError, match=words):
        for _ in range(9):
            engine.step()
