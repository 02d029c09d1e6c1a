"""Arrivals and lengths: what comes, when, and what a bad file says."""

import json
from pathlib import Path

import numpy as np
import pytest

from cbref import Engine
from cbref.workloads import AZURE, AZURE_PERCENT, azure, chat, read_azure_csv, serve

TRACES = Path(__file__).resolve().parents[2].parent / "shared/data/azure"
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize("kind", AZURE)
def test_lengths_follow_the_quantiles(kind):
    work = azure(kind, 20_000)
    for column, lengths in (("prompt", map(len, work.prompts)), ("output", (p.max_tokens for p in work.params))):
        lengths = np.fromiter(lengths, int)
        quantiles = AZURE[kind][column]
        assert quantiles[0] <= lengths.min() and lengths.max() <= quantiles[-1]
        for percent, quantile in zip(AZURE_PERCENT, quantiles, strict=True):  # about so many lie below it, or on it
            below, upto = 100 * np.mean(lengths < quantile), 100 * np.mean(lengths <= quantile)
            assert below - 4 <= percent <= upto + 4, (column, percent)


@pytest.mark.parametrize("kind", AZURE)
def test_lengths_are_those_of_the_trace(kind):
    path = TRACES / f"AzureLLMInferenceTrace_{kind}.csv"
    if not path.exists():
        pytest.skip(f"no {path.name}: the traces of the Azure service are not part of the project")
    trace, work = read_azure_csv(path), azure(kind, 100_000)
    for column, lengths_of in (("prompt", prompt_lengths), ("output", output_lengths)):
        real, drawn = lengths_of(trace), lengths_of(work)
        assert np.abs(np.percentile(real, AZURE_PERCENT) - AZURE[kind][column]).max() <= 0.5
        assert drawn.mean() == pytest.approx(real.mean(), rel=0.1 if (kind, column) == ("code", "output") else 0.02)


def prompt_lengths(work):
    return np.array([len(prompt) for prompt in work.prompts])


def output_lengths(work):
    return np.array([params.max_tokens for params in work.params])


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_arrivals(cv):
    gaps = np.diff(azure("conv", 20_000, rate=5.0, cv=cv).arrivals)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_seeds():
    assert azure("code", 50, 2.0, seed=1) == azure("code", 50, 2.0, seed=1)
    assert azure("code", 50, 2.0, seed=1) != azure("code", 50, 2.0, seed=2)
    assert chat(8, seed=3) == chat(8, seed=3)


def test_made_up_prompts_share_no_prefix():
    first = {prompt[0] for prompt in azure("conv", 100).prompts}
    assert len(first) == 100


def test_a_trace_is_read_in_the_order_of_time(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(HEAD + "2023-11-16 18:15:50.9430000,40,7\n2023-11-16 18:15:46.6805900,374,44\n")
    work = read_azure_csv(file)
    assert [len(p) for p in work.prompts] == [374, 40] and [p.max_tokens for p in work.params] == [44, 7]
    assert work.arrivals == pytest.approx([0.0, 4.26241])
    assert read_azure_csv(file, limit=1).arrivals == [0.0]
    assert work.at_rate(2.0).arrivals == pytest.approx([0.0, 0.5])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: no column ContextTokens, GeneratedTokens, TIMESTAMP"),
        ("TIMESTAMP,ContextTokens\n", "line 1: no column GeneratedTokens"),
        (HEAD, "holds no requests"),
        (HEAD + "2023-11-16 18:15:46.68,3,4\n2023-11-16 18:15:46.68,x,4\n", "line 3: .*'x'"),
        (HEAD + "2023-11-16 18:15:46.68,3,0\n", "line 2: 0 tokens"),
        (HEAD + "yesterday,3,4\n", "line 2: .*yesterday"),
        (HEAD + "2023-11-16 18:15:46.68,3\n", "line 2"),
    ],
)
def test_a_bad_trace_names_the_line_and_the_reason(tmp_path, text, words):
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_azure_csv(file)


@pytest.mark.parametrize("arguments", [("conv", 0), ("conv", 5, 0.0), ("conv", 5, 1.0, 0, 0.0), ("chat", 5)])
def test_refusals(arguments):
    with pytest.raises(ValueError):
        azure(*arguments)


def test_an_open_loop_does_not_wait_for_answers():
    engine = Engine.simulated("orca", 1, model="llama-3-8b", hardware="h100")
    work = azure("conv", 30, rate=20.0)
    requests = serve(engine, work, progress=False)
    assert [r.arrival for r in requests] == pytest.approx(work.arrivals)
    assert max(r.admitted - r.arrival for r in requests) > 1  # one slot can't keep up, and a queue builds
    assert all(len(r.output) == p.max_tokens for r, p in zip(requests, work.params, strict=True))


@pytest.mark.parametrize("clients", [1, 3])
def test_a_closed_loop_keeps_so_many_in_flight(clients):
    engine = Engine.simulated("orca", 8)
    requests = serve(engine, azure("code", 20), clients=clients, progress=False)
    assert len(requests) == 20
    moments = sorted({r.arrival for r in requests})
    in_flight = [sum(r.arrival <= at < r.finished for r in requests) for at in moments]
    assert set(in_flight) == {clients}


def test_a_workload_is_plain_numbers():
    json.dumps([p.max_tokens for p in azure("conv", 3).params] + azure("conv", 3, 1.0).arrivals)
