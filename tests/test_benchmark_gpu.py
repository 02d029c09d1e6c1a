"""benchmarks/gpu.py: its run without a GPU, and that no part's failure hides another's result."""

import importlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
KERNELS = (
    "rmsnorm", "rmsnorm+residual", "rope", "kv_write", "decode_attention", "prefill_attention", "mixed_attention",
)  # fmt: skip
FOR_GPUS = {
    "peaks": ("copy bandwidth", "matrix product"),
    "decode speed": ("decode attention 32 × 8192", "decode attention 1 × 32768", "decode attention 128 × 1024"),
    "prefill speed": ("prefill attention 1 × 8192", "prefill attention 4 × 2048"),
    "mixed speed": ("mixed kernel",),
    "check waiting": ("host waits in a step",),
    "flex speed": ("prefill attention 1 × 8192 against flex_attention",),
}

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the run without a GPU is looked at")


def run(*args):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # the script sets it
    command = [sys.executable, "benchmarks/gpu.py", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The command with ``--out``: what it printed, what it wrote, and how long it took."""
    out = tmp_path_factory.mktemp("gpu") / "result.json"
    begin = time.perf_counter()
    said = run("--out", out)
    assert said.returncode == 0, said.stdout + said.stderr
    result = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))
    return said.stdout, result, time.perf_counter() - begin


def rows(result, part):
    return {row["what"]: row for row in result["parts"][part]["rows"]}


@without_gpu
def test_says_what_it_ran_on(whole_run):
    _, result, seconds = whole_run
    assert seconds < 90
    assert result["gpu"] is None
    assert {"python", "cbref", "torch", "triton", "transformers"} <= set(result["versions"])
    assert all(result["versions"].values()) and result["date"] and result["machine"]["cores"]


@without_gpu
def test_every_kernel_is_right(whole_run):
    _, result, _ = whole_run
    for kernel in KERNELS:
        found = rows(result, f"check {kernel}")
        assert list(found) == [f"{kernel} {dtype}" for dtype in ("float32", "float16", "bfloat16")]
        for what, row in found.items():
            if what.endswith("bfloat16"):
                assert row["verdict"].startswith("not run: no GPU")
            else:
                assert row["verdict"] == "pass" and row["raw"]["errors"]
                bound = float(row["target"].removeprefix("≤ "))
                assert all(0 <= error <= bound for error in row["raw"]["errors"].values())


@without_gpu
def test_what_needs_a_gpu_is_listed(whole_run):
    printed, result, _ = whole_run
    for part, names in FOR_GPUS.items():
        assert result["parts"][part]["status"].startswith("not run: no GPU")
        for name in names:
            assert any(what.startswith(name) for what in rows(result, part))
            assert name in printed
    assert all(row["verdict"].startswith("not run: no GPU") for p in FOR_GPUS for row in rows(result, p).values())


@without_gpu
def test_every_way_to_serve_answers_the_same(whole_run):
    _, result, _ = whole_run
    found = rows(result, "engine speed")
    compared = {what: row["verdict"] for what, row in found.items() if what.startswith("outputs that differ")}
    for way in ("transformers generate_batch", "transformers generate", "cbref, triton", "cbref, triton + kernels"):
        assert compared[f"outputs that differ: {way} and cbref, torch"] == "pass"
    for way in ("transformers generate_batch", "transformers generate", "cbref, torch"):
        for count in ("1 request", "3 requests"):
            assert found[f"{way}, {count}"]["value"] > 0 and found[f"{way}, {count}"]["raw"]["seconds"]
    for what, row in found.items():  # nothing that the interpreter did was timed
        if "triton" in what and not what.startswith("outputs"):
            assert row["value"] is None and row["verdict"].startswith("not run: no GPU")
    agreed = [row for row in rows(result, "check backends").values() if row["value"] is not None]
    assert len(agreed) >= 6 and all(row["verdict"] == "pass" for row in agreed)


@without_gpu
def test_step_times_are_held_against_the_simulator(whole_run):
    _, result, _ = whole_run
    found = rows(result, "simulator")
    for kind in ("steps of decodes", "steps with chunks"):
        row = found[f"torch, calibrated: median error, {kind}"]
        raw = row["raw"]
        assert len(raw["measured"]) == len(raw["predicted"]) == raw["steps"] > 0
        assert math.isfinite(row["value"]) and row["value"] >= 0
        assert found[f"torch, calibrated: p90 error, {kind}"]["value"] >= row["value"]


def test_an_unknown_part_is_refused():
    said = run("--only", "no-such-part")
    assert said.returncode == 2 and "decode speed" in said.stderr


# ---- one part and the others


@pytest.fixture
def module(monkeypatch):
    """Modules of benchmarks/gpu/ by name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return lambda name: importlib.import_module(f"gpu.{name}")


def test_a_part_that_fails_loses_no_other(module):
    parts, machine = module("parts"), module("machine").Machine()

    def broken(machine):
        yield parts.figure("before", 1.0, "s")
        yield from parts.attempt("a piece", iter(lambda: 1 / 0, None))
        yield parts.figure("after", 2.0, "s")
        raise RuntimeError("the kernel\nis broken")

    def sound(machine):
        yield parts.check("sound", 0.1, 0.2)
        yield parts.goal("slow", 1.0, "×", 3.0)

    def wrong(machine):
        yield parts.check("error", math.nan, 0.2)

    plan = [parts.Part("broken", broken, 1), parts.Part("sound", sound, 1), parts.Part("wrong", wrong, 1)]
    report = parts.run_parts(plan, machine, 60, progress=False)
    assert {name: part["status"] for name, part in report.items()} == {
        "broken": "failed", "sound": "ok", "wrong": "failed",
    }  # fmt: skip
    assert [row.what for row in report["broken"]["rows"]] == ["before", "a piece", "after"]
    assert report["broken"]["error"] == "RuntimeError: the kernel\nis broken"
    assert len(parts.tracebacks(report["broken"])) == 2
    assert [row.verdict for row in report["sound"]["rows"]] == ["pass", "missed"]
    text = parts.table(report)
    assert "failed: RuntimeError: the kernel" in text and "failed: ZeroDivisionError" in text and "≥ 3 ×" in text
    assert parts.as_json(report)["wrong"]["rows"][0]["value"] == "nan"
    json.dumps(parts.as_json(report), allow_nan=False)


def test_parts_that_do_not_fit_are_listed(module):
    parts, machine = module("parts"), module("machine").Machine()
    seen = []

    def look(machine):
        seen.append(machine.time_left)
        yield parts.figure("one", 1.0, "")

    plan = [parts.Part("first", look, 1), parts.Part("second", look, 20), parts.Part("third", look, 100)]
    report = parts.run_parts(plan, machine, 60, progress=False)
    assert [part["status"].split(":")[0] for part in report.values()] == ["ok", "ok", "not run"]
    assert report["third"]["rows"][0].verdict.endswith("s are left, and it takes about 100 s")
    assert seen[1] < 60 - 100 < 0  # a part leaves the later ones their time


# ---- what only a GPU runs, rehearsed in small on the CPU: it must at least do what it says


@pytest.fixture
def rehearsal(module, monkeypatch):
    """A machine whose stopwatch calls the function once, and small heads."""

    class Rehearsal(module("machine").Machine):
        copy_bandwidth = matmul_rate = 1e9

        def seconds(self, function, record=True):
            self.result = function()
            return 1e-3

    monkeypatch.setattr(module("kernels"), "HEADS", (4, 2, 64))
    return Rehearsal()


@without_gpu
def test_speeds_are_taken_of_the_right_thing(module, rehearsal):
    kernels = module("kernels")
    [row] = kernels._decode_speed(rehearsal, "decode", 2, 48)
    assert rehearsal.result.shape == (2, 4, 64)
    assert row.raw["bytes"] == 2 * 2 * 48 * 2 * 64 * 4  # keys and values, requests, tokens, heads, dimension, fp32
    assert row.value == pytest.approx(100 * row.raw["bytes"] / 1e-3 / 1e9)

    share, against = kernels._prefill_speed(rehearsal, "prefill", 2, 20, 0)
    assert share.raw["flops"] == 4 * 4 * 64 * 2 * sum(range(1, 21))  # two products of two operations a pair
    assert rehearsal.result.shape == (2, 4, 20, 64) and against.value == pytest.approx(100)  # flash SDPA came last
    [row] = kernels._prefill_speed(rehearsal, "prefill", 1, 8, 12)
    assert row.raw["flops"] == 4 * 4 * 64 * sum(range(13, 21))


@without_gpu
def test_a_host_wait_is_found(module, rehearsal, monkeypatch):
    steps = module("steps")
    modes = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    [row] = steps._waits(rehearsal, "waits", "torch", False, 4)
    assert row.verdict == "pass" and modes == ["error", "default"]

    forward = steps._forward

    def waiting(*args):
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return forward(*args)

    monkeypatch.setattr(steps, "_forward", waiting)
    [row] = steps._waits(rehearsal, "waits", "torch", False, 4)
    assert row.verdict == "fail" and "synchronizing" in row.raw["raised"] and modes[-1] == "default"


@without_gpu
def test_the_reference_is_attention(module, rehearsal):
    """float64 against torch's own, for chunks with and without a past."""
    kernels = module("kernels")
    step = kernels.make_step(rehearsal, (20, 9), (5, 9), poison=True)
    expected = kernels.exact(step, (5, 9), 0.2)
    first = 0
    for places, chunk in zip(step.places, (5, 9), strict=True):
        q = step.q[first : first + chunk].double().transpose(0, 1)[None]
        k, v = (c.view(-1, 2, 64)[places].double().transpose(0, 1)[None] for c in step.caches)
        mask = torch.ones(chunk, len(places), dtype=torch.bool).tril(len(places) - chunk)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.2, enable_gqa=True)
        assert torch.allclose(theirs[0].transpose(0, 1), expected[first : first + chunk], atol=1e-12)
        assert torch.equal(step.k[first : first + chunk], step.key_cache.view(-1, 2, 64)[places[-chunk:]])
        first += chunk
