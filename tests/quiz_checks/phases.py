"""The numeric answers of the quiz of the chapter on prefill and decode, computed."""

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
    return round(64 * 2000 * MODELS["llama-3-8b"].kv_bytes_per_token / 1e9, 1)
