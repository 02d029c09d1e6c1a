"""The numeric answers of the quiz of the chapter on prefill and decode, computed."""

import torch

from cbref import Engine, SamplingParams
from cbref.hardware import MODELS, Hardware, ModelShape


def phases_ridge():
    """The first number of tokens whose arithmetic takes as long as reading the weights."""
    gpu = Hardware("made up", 200e12, 1e12, 80e9, mfu=1.0, mbu=1.0, tile=1)
    model = MODELS["llama-3-8b"]
    memory = gpu.linear_seconds(model, 1)
    first = next(m for m in range(1, 1000) if gpu.linear_seconds(model, m + 1) > memory)
    assert first == round(gpu.ridge)
    return first


def phases_attention():
    model = ModelShape("made up", layers=40, hidden=6144, heads=48, kv_heads=6, head_dim=128, intermediate=1, vocab=1)
    context = 32 * 4000
    return 4 * model.layers * model.heads * model.head_dim * context / (model.kv_bytes_per_token * context)


def phases_steps():
    engine = Engine.simulated("orca", 1)
    engine.generate([range(700)], SamplingParams(max_tokens=20, ignore_eos=True), progress=False)
    return engine.num_steps


def phases_cache():
    return round(48 * 3000 * MODELS["llama-3-8b"].kv_bytes_per_token / 1e9, 1)


def phases_join():
    """Parts of one past whose scores give these outputs and sums: one key of score 0, three of score 0."""
    values = torch.tensor([2.0, 10.0, 10.0, 10.0], dtype=torch.float64)
    scores = torch.zeros(4, dtype=torch.float64)
    parts = [slice(0, 1), slice(1, 4)]
    outputs = torch.stack([scores[p].softmax(0) @ values[p] for p in parts])
    lse = torch.stack([scores[p].logsumexp(0) for p in parts])
    assert outputs.tolist() == [2, 10] and torch.allclose(lse.exp(), torch.tensor([1.0, 3.0], dtype=torch.float64))
    whole = scores.softmax(0) @ values
    assert torch.allclose(lse.softmax(0) @ outputs, whole)
    return round(whole.item(), 9)
