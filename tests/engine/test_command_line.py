"""``python -m cbref generate`` and ``compare``, with the real model."""

import json

import pytest

from cbref import __main__ as cli


@pytest.mark.parametrize(("command", "slots"), [(["generate", "x"], 8), (["compare"], 8), (["simulate"], 128)])
def test_each_command_has_its_own_number_of_slots(command, slots):
    assert cli._parser().parse_args(command).max_batch_size == slots


def test_generate_streams_the_answer_and_says_what_computes_attention(capsys):
    assert cli.main(["generate", "The capital of France is", "--max-tokens", "3", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "Paris" in out and err.startswith("attention: torch: ")


def test_compare_serves_the_same_under_both_policies(capsys):
    arguments = ["--requests", "9", "--scale", "0.02", "--max-batch-size", "2", "--device", "cpu", "--json", "--quiet"]
    assert cli.main(["compare", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    static, orca = report["policies"]["static"], report["policies"]["orca"]
    assert static["output_tokens"] == orca["output_tokens"] and static["steps"] >= orca["steps"]
    assert report["setting"]["attention"].startswith("torch: ")


def test_an_attention_that_cannot_be_had_is_refused_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert cli.main(["generate", "x", "--attention", "triton", "--device", "cpu"]) == 2
    assert "needs a GPU" in capsys.readouterr().err
