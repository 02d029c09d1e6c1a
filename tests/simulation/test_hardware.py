"""The roofline against arithmetic by hand, and against times that others measured."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from cbref import Engine, SamplingParams
from cbref.executors.roofline import RooflineExecutor
from cbref.hardware import HARDWARE, MODELS, ModelShape, find_hardware, find_model
from cbref.kv_cache import BlockPool
from cbref.request import Chunk, Request

ROOT = Path(__file__).parents[2]
MEASURED = ROOT.parent / "shared" / "data" / "measured"


def ideal(gpu, mfu=1.0, tp=1):
    """Arithmetic at this MFU, memory for nothing, no tiles: the fact sheet's formula for prefill."""
    return replace(HARDWARE[gpu], mfu=mfu, mbu=1.0, bandwidth=1e18, tile=1, tp=tp)


@pytest.mark.parametrize(
    ("model", "tp", "gpu", "seconds"),  # at 100, 70 and 50 % MFU
    [
        ("llama-3-8b", 1, "a100", (4.3, 6.2, 8.7)),
        ("llama-3-8b", 1, "h100", (1.37, 1.95, 2.74)),
        ("llama-3-8b", 1, "b200", (0.60, 0.86, 1.20)),
        ("llama-3-70b", 8, "a100", (4.1, 5.8, 8.1)),
        ("llama-3-70b", 8, "h100", (1.28, 1.83, 2.56)),
        ("llama-3-70b", 8, "b200", (0.56, 0.80, 1.12)),
    ],
)
def test_the_prompt_of_50_000_tokens(model, tp, gpu, seconds):
    """The document says 800 ms; these are the times of common setups."""
    shape = MODELS[model]
    for mfu, expected in zip((1.0, 0.7, 0.5), seconds, strict=True):
        hw = ideal(gpu, mfu, tp)
        time = hw.linear_seconds(shape, 50_000) + hw.chunk_attention_seconds(shape, 0, 50_000)
        assert time == pytest.approx(expected, rel=0.02)


def test_shapes():
    assert MODELS["llama-3-8b"].linear_params == pytest.approx(6.98e9, rel=0.001)
    assert MODELS["llama-3-70b"].linear_params == pytest.approx(68.45e9, rel=0.001)
    assert MODELS["llama-3-8b"].kv_bytes_per_token * 50_000 == pytest.approx(6.55e9, rel=0.001)
    assert MODELS["llama-3-70b"].kv_bytes_per_token * 50_000 == pytest.approx(16.4e9, rel=0.002)
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128_256,
    )  # fmt: skip
    assert ModelShape.from_config(config, "llama-3-8b") == MODELS["llama-3-8b"]


@pytest.mark.parametrize(
    ("gpu", "ridge"),
    [("t4", 203), ("l4", 403), ("a100-40", 201), ("a100", 153), ("h100", 295), ("h200", 206), ("b200", 281)],
)
def test_ridges(gpu, ridge):
    assert HARDWARE[gpu].ridge == pytest.approx(ridge, abs=1)


@pytest.mark.parametrize(
    ("gpu", "context", "ms"), [("a100", 2000, 13.4), ("h100", 2000, 8.1), ("h200", 2000, 5.7), ("a100", 8000, 27.8)]
)
def test_thirty_decodes(gpu, context, ms):
    """Without the LM head, which the figures leave out."""
    hw, shape = HARDWARE[gpu], MODELS["llama-3-8b"]
    assert 1e3 * (hw.linear_seconds(shape, 30) + hw.kv_read_seconds(shape, 30 * context)) == pytest.approx(ms, rel=0.01)


def test_a_tile_too_many():
    hw, shape = HARDWARE["a100"], MODELS["llama-3-8b"]
    assert (
        hw.linear_seconds(shape, 257)
        == hw.linear_seconds(shape, 384)
        == pytest.approx(1.5 * hw.linear_seconds(shape, 256))
    )
    assert hw.linear_seconds(shape, 1) == hw.linear_seconds(shape, 128)  # memory-bound: the weights are read either way


def test_a_step_is_the_sum_of_its_parts():
    """The executor's fast path for decodes against ``Hardware`` asked chunk by chunk."""
    hw, shape = replace(HARDWARE["a100"], overhead=0.001, tp=2, link=1e11, sync=1e-5), MODELS["llama-3-8b"]
    executor, pool = RooflineExecutor(shape, hw), BlockPool(10, 16)
    chunks = []
    for i, (prompt, start, stop) in enumerate([(100, 99, 100), (700, 699, 700), (300, 0, 300), (900, 256, 512)]):
        chunks.append(Chunk(Request(str(i), range(prompt), SamplingParams()), start, stop))
    executor.execute(chunks, pool)
    expected = hw.fixed_seconds(shape, 558) + hw.linear_seconds(shape, 558) + hw.head_seconds(shape, 3)
    expected += hw.kv_read_seconds(shape, 100) + hw.kv_read_seconds(shape, 700)
    expected += hw.chunk_attention_seconds(shape, 0, 300) + hw.chunk_attention_seconds(shape, 256, 512)
    assert executor.now() == pytest.approx(expected)
    assert 0 < executor.utilisation()["mfu"] < hw.mfu and 0 < executor.utilisation()["mbu"] < hw.mbu


def test_memory_caps_the_batch():
    engine = Engine.simulated(model="llama-3-8b", hardware="h100", block_size=16)
    tokens = HARDWARE["h100"].kv_capacity(MODELS["llama-3-8b"])
    assert engine.pool.num_blocks == tokens // 16
    assert pytest.approx(tokens * 131_072, rel=0.01) == 0.9 * 80e9 - 16.1e9
    with pytest.raises(ValueError, match="raise tp"):
        Engine.simulated(model="llama-3-70b", hardware="h100")
    assert Engine.simulated(model="llama-3-70b", hardware="h100", tp=4).pool.num_blocks > 1000


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: find_model("gpt-5"), "gpt-5.*llama-3-8b"),
        (lambda: find_hardware("h1000"), "h1000.*h100"),
        (lambda: find_hardware("h100", 0), "tp is 0"),
        (lambda: Engine.simulated(model="llama-3-8b", step_time=1.0), "step_time"),
        (lambda: Engine.simulated(step_time=-1.0), "step_time is -1.0"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_no_torch_on_the_way():
    code = (
        "import sys\nfrom cbref import Engine\nfrom cbref.workloads import azure, serve\n"
        "import cbref.export, cbref.plots\n"
        "e = Engine.simulated('sarathi', model='llama-3-8b', hardware='h100')\n"
        "serve(e, azure('conv', 5, rate=1.0), progress=False)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- against measurements; the fitted factors are those of the benchmark's stored result


def accuracy(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("simulator_accuracy")


@pytest.mark.skipif(
    not MEASURED.is_dir(), reason=f"the measured times are not part of the project; looked in {MEASURED.name}/"
)
def test_the_median_error_against_measured_times(monkeypatch):
    tool = accuracy(monkeypatch)
    report = json.loads((ROOT / "benchmarks" / "results" / "simulator_accuracy.json").read_text())
    points = tool.splitwise(MEASURED / "splitwise_perf_model.csv") + tool.vidur(MEASURED)
    groups = {}
    for point in points:
        groups.setdefault(point.group, []).append(point)
    assert set(groups) == set(report["groups"])
    for name, members in groups.items():
        fitted = report["groups"][name]["fitted"]
        link = fitted["link_gb_per_s"]
        hw = replace(
            HARDWARE[name.split()[1]], mfu=fitted["mfu"], mbu=fitted["mbu"], overhead=fitted["overhead_ms"] / 1e3,
            link=np.inf if link is None else link * 1e9, sync=fitted["sync_us"] / 1e6,
        )  # fmt: skip
        median = np.median(np.abs(tool.errors(members[1::2], hw)))  # points that the fit has not seen
        assert median < 0.15, (name, median)
        assert median == pytest.approx(report["groups"][name]["median_error"], abs=0.01)
