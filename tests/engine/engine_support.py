"""Small models, fakes and oracles that the engine's tests share."""

import contextlib
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cbref import Engine, SamplingParams, Scheduler
from cbref.executors.model import ModelExecutor
from cbref.executors.simulated import SimulatedExecutor
from cbref.request import Chunk, Sampled

POLICIES = ("static", "orca")
VOCAB = 96


def tiny_model(kind="llama", seed=0, **config):
    """A random decoder with weights so large that every token of the context moves the logits."""
    config = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        **config,
    }
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).eval()


@contextlib.contextmanager
def plain(model):
    """The same weights with transformers' own attention, for the time being."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield model
    finally:
        model.set_attn_implementation(ours)


def reference(model, prompt, max_tokens, **options):
    """What transformers' ``generate`` answers to one prompt alone: ids, and their logits [ids, vocabulary]."""
    ids = torch.tensor([list(prompt)])
    with plain(model), torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # else transformers takes the padding id in a prompt for padding
            max_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
    return out.sequences[0, len(prompt) :].tolist(), torch.stack(out.logits)[:, 0].float()


def next_logits(model, ids):
    """Logits after ``ids``, by transformers alone, in float64 for computations by hand."""
    with plain(model), torch.inference_mode():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0, -1].double().numpy()


def serve(executor, prompts, params, policy="orca", slots=4, seed=None):
    """Completions in the order of ``prompts``; the engine must be whole and at rest afterwards."""
    engine = Engine(executor, policy, seed=seed, max_num_seqs=slots)
    done = engine.generate(prompts, params, progress=False)
    assert_at_rest(engine)
    return done


def assert_at_rest(engine):
    engine.audit()
    assert not engine.has_work and not engine.scheduler.running and not engine.scheduler.waiting
    assert not engine._inboxes and not engine._texts
    assert engine.pool.num_free == engine.pool.num_blocks and not engine.pool.holders()
    assert engine.step() == []


class Chunked(Scheduler):
    """No prompt is computed faster than ``size`` tokens a step."""

    def __init__(self, size, max_num_seqs=4):
        super().__init__(max_num_seqs)
        self.size = size

    def compose(self):
        cut = [(r, r.num_computed, min(r.num_computed + self.size, r.num_tokens)) for r in self.running if not r.done]
        return [Chunk(*c) for c in cut]


class Around:
    """An executor around another one; a subclass changes what it wants to."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


class Scripted(SimulatedExecutor):
    """A simulator whose requests say what the script says: ``{id: [Sampled or token, ...]}``, then 1 for ever."""

    eos_token_ids = frozenset({9})

    def __init__(self, script=None, **options):
        super().__init__(**options)
        self.script = script or {}

    def execute(self, chunks, pool):
        super().execute(chunks, pool)
        return [self._answer(c.request) if c.yields_token else None for c in chunks]

    def _answer(self, request):
        said = self.script.get(request.id, ())
        answer = said[len(request.output)] if len(request.output) < len(said) else 1
        return answer if isinstance(answer, Sampled) else Sampled(answer)


def executor_of(model, **options):
    return ModelExecutor(model, **{"num_blocks": 256, "block_size": 4, **options})


def prompts_of(lengths, seed=0):
    dice = random.Random(seed)
    return [[dice.randrange(1, 90) for _ in range(n)] for n in lengths]


def greedy(max_tokens, **options):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.fixture(autouse=True)
def threads(request):
    """Small models run on one thread: two would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if "smollm" in request.fixturenames else 1)
    yield
    torch.set_num_threads(before)
