"""The recorded table of the Azure lengths: what the traces say, where they are; and that it fits what is drawn."""

import importlib
from pathlib import Path

import pytest

from cbref import recorded
from cbref.workloads import AZURE, AZURE_PERCENT

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT.parent / "shared" / "data" / "azure"
TABLE = recorded.load("azure_lengths")


def test_the_table_follows_from_the_traces(monkeypatch):
    if not TRACES.is_dir():
        pytest.skip("the traces of the Azure service are not part of the project: shared/data/azure")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    assert importlib.import_module("azure_lengths").measure(TRACES) == TABLE


@pytest.mark.parametrize("kind", AZURE)
def test_percentiles_are_those_that_are_drawn_from(kind):
    for ours, theirs in (("prompt", "prompt"), ("answer", "output")):
        drawn = dict(zip(AZURE_PERCENT, AZURE[kind][theirs], strict=True))
        names = {"min": 0, "p5": 5, "p50": 50, "p95": 95, "max": 100}
        table = TABLE["traces"][kind][ours]
        assert {name: table[name] for name in names} == {name: drawn[percent] for name, percent in names.items()}


def test_what_the_chapters_say_in_words():
    """ "One place in thirteen", "two thirds are dead weight", "longer prompts tend to get shorter answers"."""
    conv = TABLE["traces"]["conv"]
    assert round(1 / conv["live_share"]["max"]) == 13
    assert conv["batches"][-1]["size"] == 64 and 0.64 < 1 - conv["batches"][-1]["useful"] < 0.68
    assert conv["correlation"] < -0.1
    for row in conv["batches"][1:]:  # neighbours in the trace are more alike than by chance
        assert row["useful"] > row["useful_shuffled"]
