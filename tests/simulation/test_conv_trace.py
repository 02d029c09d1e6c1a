"""benchmarks/conv_trace.py: it runs on the beginning of the trace, and its recorded result says what made it."""

import importlib
import re
from datetime import date
from pathlib import Path

import pytest

from cbref import recorded
from cbref.workloads import read_azure_csv

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT.parent / "shared" / "data" / "azure" / "AzureLLMInferenceTrace_conv.csv"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("conv_trace")


@pytest.fixture
def beginning():
    if not TRACE.exists():
        pytest.skip(f"the trace is not here: {TRACE.relative_to(ROOT.parent)}")
    return read_azure_csv(TRACE, limit=300)


def test_the_beginning_of_the_trace(benchmark, beginning):
    static, orca, sarathi = (
        benchmark.run(beginning, title, progress=False) for title in ("static", "orca", "sarathi 512")
    )
    assert static["steps"] > 0 and static["preemptions"] == 0
    assert static["ttft_p50"] > 10 * orca["ttft_p50"] and static["attainment"] < orca["attainment"]
    assert sarathi["tbt_p99"] < orca["tbt_p99"] and sarathi["attainment"] == 1
    assert set(static) == set(recorded.load("conv_trace")["policies"]["static"])


def test_the_recorded_run_says_what_made_it(benchmark):
    table = recorded.load("conv_trace")
    assert benchmark.SOURCE.items() <= table.items() and table["licence"] == "CC BY 4.0"
    assert date.fromisoformat(table["date"]) and table["machine"]["cores"] >= 1
    assert {"python", "cbref", "numpy"} == set(table["versions"])
    assert all(re.match(r"\d+\.\d+", version) for version in table["versions"].values())
    assert list(table["policies"]) == list(benchmark.POLICIES) and table["trace"]["requests"] == 19_366
    for title, figures in table["policies"].items():  # goodput is what was kept of the requests, by the run's seconds
        kept = figures["attainment"] * table["trace"]["requests"]
        assert figures["goodput"] == pytest.approx(kept / figures["seconds"], rel=1e-3), title


def test_the_command_takes_a_folder(benchmark, beginning, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "POLICIES", {"orca": benchmark.POLICIES["orca"]})
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["conv_trace.py", str(TRACE.parent), "--limit", "20", "--out", str(out)])
    benchmark.main()
    assert '"requests": 20' in out.read_text() and str(TRACE.parent) not in out.read_text()
