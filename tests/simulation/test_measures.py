"""Metrics by hand, exports, figures, calibration, and what the simulator costs."""

import cProfile
import json
import pstats
import re
import sys
from itertools import pairwise

import matplotlib
import numpy as np
import pytest

from cbref import Engine, SamplingParams, calibrate
from cbref import __main__ as cli
from cbref.executors.roofline import RooflineExecutor
from cbref.executors.simulated import SimulatedExecutor
from cbref.export import chrome_trace
from cbref.hardware import MODELS
from cbref.metrics import SLO, RequestMetrics
from cbref.request import Chunk, Request
from cbref.schedulers import POLICIES
from cbref.strings import load
from cbref.workloads import azure, of_lengths, serve

matplotlib.use("Agg")
from cbref import plots


def run(policy="orca", lengths=(4, 2, 6, 3, 5, 2), slots=3, prompt=5, **options):
    engine = Engine.simulated(policy, slots, **options)
    return engine, serve(engine, of_lengths(lengths, prompt), progress=False)


# ---- metrics


def test_the_measures_of_one_request():
    m = RequestMetrics(arrival=1.0, admitted=1.5, token_times=[2.0, 2.25, 3.25], finished=4.0)
    assert (m.queueing_delay, m.ttft, m.e2e) == (0.5, 1.0, 3.0)
    assert m.tbt.tolist() == m.itl.tolist() == [0.25, 1.0]
    assert m.normalized_latency == 1.0
    assert m.meets(SLO(1.0, 1.0)) and not m.meets(SLO(0.9, 1.0)) and not m.meets(SLO(1.0, 0.9))
    assert not RequestMetrics(0.0, None, [], 1.0).meets(SLO(9.0, 9.0))


def test_a_summary_by_hand():
    engine, requests = run(slots=2, lengths=(3, 1, 2))
    # slot 1: A A A; slot 2: B C C
    s = engine.summary(requests, SLO(ttft=1.0, tbt=1.0))
    assert (s["steps"], s["output_tokens"], s["seconds"], s["wasted_slot_iterations"]) == (3, 6, 3.0, 0)
    assert (s["tokens_per_second"], s["requests_per_second"], s["occupancy"]) == (2.0, 1.0, 1.0)
    assert s["ttft"]["p50"] == 1.0 and s["ttft"]["p99"] == pytest.approx(np.percentile([1, 1, 2], 99))
    assert s["tbt"] == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert s["slo"]["attainment"] == pytest.approx(2 / 3) and s["goodput"] == pytest.approx(2 / 3)
    json.dumps(s)


@pytest.mark.parametrize("policy", POLICIES)
def test_sums_and_records_agree(policy):
    engine, requests = run(policy, prompt=9)
    totals, steps = engine.totals, engine.steps
    assert totals.steps == len(steps) == engine.num_steps
    assert totals.computed_tokens == sum(s.num_tokens for s in steps)
    assert totals.slot_iterations == sum(len(s.shares) for s in steps)
    assert (totals.kv_reserved, totals.kv_live) == (sum(s.kv_reserved for s in steps), sum(s.kv_live for s in steps))
    unrecorded, again = run(policy, prompt=9, record=False)
    assert unrecorded.steps == [] and unrecorded.summary(again) == engine.summary(requests)
    engine.forget_steps()
    assert engine.num_steps == 0 and engine.summary(requests)["steps"] == 0


def test_a_run_without_requests_has_a_summary():
    assert Engine.simulated().summary([])["tokens_per_second"] is None


# ---- exports and figures


def test_the_chrome_trace(tmp_path):
    engine, _ = run(slots=2)
    chrome_trace({"orca": engine.steps}, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    bars = [e for e in events if e["ph"] == "X"]
    assert sum(e["dur"] for e in bars) == pytest.approx(22e6)  # 22 tokens, a second each
    for slot in (0, 1):
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in bars if e["tid"] == slot)
        assert all(stop <= begin for (_, stop), (begin, _) in pairwise(row)), "bars overlap"


def figures():
    runs = {policy: run(policy) for policy in ("static", "orca")}
    steps = {policy: engine.steps for policy, (engine, _) in runs.items()}
    done = {policy: [engine.completion(r) for r in requests] for policy, (engine, requests) in runs.items()}
    metrics = {policy: [c.metrics for c in completions] for policy, completions in done.items()}
    yield plots.slot_timeline(steps, 3)
    yield plots.slot_timeline(steps, 3, clock="seconds")
    yield plots.kv_memory(steps)
    yield plots.token_times(done)
    yield plots.batch_composition(steps)
    yield plots.latencies(metrics)
    yield plots.load_curve({"static": [(1, 0.1), (2, 0.3)], "orca": [(1, 0.1), (2, 0.1)]})
    yield plots.batch_scaling([1, 2, 4], [1.0, 1.1, 1.4])


def test_every_word_of_a_figure_can_be_translated(monkeypatch):
    """With every text in the catalogue replaced, no English is left in any figure."""
    texts = load("plots")
    monkeypatch.setattr(plots.serving, "load", lambda group: {key: f"§{key}§" for key in texts})
    for figure in figures():
        figure.canvas.draw()
        for text in figure.findobj(matplotlib.text.Text):
            words = text.get_text()
            spare = words.startswith("§") or not any(c.isalpha() for c in re.sub(r"\\[a-z]+", "", words))
            assert spare or len(words) == 1, words  # single letters name requests
        matplotlib.pyplot.close(figure)


# ---- calibration


class Lawful(SimulatedExecutor):
    """Steps take what a law says, so that the calibration can be checked against it."""

    def step_seconds(self, chunks):
        tokens = sum(map(len, chunks))
        seconds = 0.02 + 0.001 * tokens + 0.00002 * max(0, tokens - 8) ** 1.5
        for chunk in chunks:
            if len(chunk) == 1:
                seconds += 5e-6 * chunk.stop
            else:
                seconds += 0.002 + 3e-8 * (chunk.start + 1 + chunk.stop) * len(chunk) / 2
        return seconds


def test_calibration_finds_the_law():
    law = Lawful(num_blocks=4096)
    machine = calibrate(law, progress=False)
    twin = RooflineExecutor(MODELS["smollm2-135m"], machine, num_blocks=4096)
    rng = np.random.default_rng(0)
    for _ in range(200):
        chunks = []
        for i in range(rng.integers(1, 12)):
            start = int(rng.integers(0, 500))
            stop = start + (1 if rng.random() < 0.7 else int(rng.integers(2, 100)))
            chunks.append(Chunk(Request(str(i), range(stop), SamplingParams()), start, stop))
        assert twin.step_seconds(chunks) == pytest.approx(law.step_seconds(chunks), rel=0.08)


# ---- cost


def calls(requests):
    """Function calls that a run takes, a measure of its cost that no other program on the machine can change."""
    engine = Engine.simulated("sarathi", 64, model="llama-3-8b", hardware="h100", record=False)
    work = azure("conv", requests, rate=6.0)
    profile = cProfile.Profile()
    profile.enable()
    serve(engine, work, progress=False)
    profile.disable()
    return pstats.Stats(profile).total_calls / sum(p.max_tokens for p in work.params), engine


def test_cost_grows_with_the_tokens_and_memory_does_not_grow_with_the_steps():
    (few, _), (many, engine) = calls(60), calls(600)
    assert many < 1.3 * few
    assert engine.steps == [] and engine.num_steps > 5000
    kept = [v for v in vars(engine).values() if isinstance(v, (list, dict))] + [engine.scheduler.running]
    assert not any(kept), "something is kept of requests that are gone"
    assert sys.getsizeof(engine.totals) < 1000


# ---- the command line


def test_simulate(capsys, tmp_path):
    trace, plot = tmp_path / "trace.json", tmp_path / "plot.png"
    arguments = ["--requests", "20", "--rate", "4", "--policy", "static", "--policy", "sarathi", "--json", "--quiet"]
    assert cli.main(["simulate", *arguments, "--trace", str(trace), "--plot", str(plot)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["policies"]) == {"static", "sarathi"} and result["setting"]["rate"] == 4
    assert {s["requests"] for s in result["policies"].values()} == {20}
    assert json.loads(trace.read_text())["traceEvents"] and plot.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["simulate", "--workload", "interactive", "--max-batch-size", "3", "--policy", "orca"]) == 0
    assert " 9 " in capsys.readouterr().out  # steps


def test_errors_are_one_line(capsys, tmp_path):
    assert cli.main(["simulate", "--csv", str(tmp_path / "none.csv")]) == 2
    assert cli.main(["simulate", "--model", "llama-3-70b", "--requests", "2"]) == 2
    assert capsys.readouterr().err.count("cbref: ") == 2
