"""The recorded tables are what the published measurements, and the compiler, say.

``python tests/book/test_recorded.py`` writes the tables anew. The published files are not part of the repository.
"""

import csv
import json
import re
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cbref import recorded

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT.parent / "shared" / "data" / "measured"
LINEAR = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 288, 384, 512, 768, 1024, 1536, 2048, 4096)
VIDUR = {
    "cite": "Agrawal et al., Vidur: A Large-Scale Simulation Framework for LLM Inference, MLSys 2024",
    "published": 2024,
    "url": "https://arxiv.org/abs/2405.05465",
    "licence": "MIT",
}
LEFT_OUT = (
    "attention core, LM head, embedding, norms, activation function, residual additions; "
    "a layer was measured, and is multiplied by the number of layers here"
)
MODELS = {
    "a100_llama3_8b": ("A100", "llama-3-8b", 32, 1),
    "h100_llama2_7b": ("H100", "llama-2-7b", 32, 1),
    "h100_llama2_70b": ("H100", "llama-2-70b", 80, 8),
}
COMPILED = ("decode/1 128 fp16", "prefill 128 fp16")
TARGETS = {75: "T4", 80: "A100", 90: "H100"}


def rows(name: str) -> list[dict]:
    with (MEASURED / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def linear_layers(name: str) -> dict:
    """Milliseconds of all linear layers by tokens in the step."""
    gpu, model, layers, tp = MODELS[name]
    found = {n: [] for n in TOKENS}
    for row in rows(f"vidur_{name}_mlp"):
        n = int(row["num_tokens"])
        if n in found and int(row["num_tensor_parallel_workers"]) == tp:
            found[n].append(layers * sum(float(row[f"time_stats.{part}.median"]) for part in LINEAR))
    left_out = LEFT_OUT + ("; what the GPUs tell each other" if tp > 1 else "")
    return {
        "what": "time of all linear layers of a step, by tokens in the step",
        "machine": f"{tp} x {gpu}" if tp > 1 else gpu,
        "model": model,
        "tensor_parallel": tp,
        **VIDUR,
        "left_out": left_out,
        "tokens": [n for n, times in found.items() if times],
        "ms": [round(statistics.median(times), 3) for times in found.values() if times],
    }


def whole_model() -> dict:
    """Milliseconds of a prompt by its length, and of a decode step by the batch size."""

    def medians(gpu: str, key: str, value: str, **fixed: str) -> dict:
        found: dict[int, list[float]] = {}
        for row in table:
            wanted = {"model": "llama2-70b", "hardware": gpu, "tensor_parallel": "8", "token_size": "128", **fixed}
            if all(row[k] == v for k, v in wanted.items()):
                found.setdefault(int(row[key]), []).append(float(row[value]))
        return {key: sorted(found), "ms": [round(statistics.median(found[n]), 1) for n in sorted(found)]}

    table = rows("splitwise_perf_model")
    machines = {"8 x A100-80GB": "a100-80gb", "8 x H100-80GB": "h100-80gb"}
    return {
        "what": "time of a whole prompt (batch of 1), and of a decode step (prompts of 512 tokens)",
        "model": "llama-2-70b",
        "tensor_parallel": 8,
        "cite": "Patel et al., Splitwise: Efficient Generative LLM Inference Using Phase Splitting, ISCA 2024",
        "published": 2024,
        "url": "https://arxiv.org/abs/2311.18677",
        "licence": "MIT",
        "left_out": "other prompts, batches and tensor parallel degrees of the published table",
        "machines": {
            name: {
                "prompt": medians(gpu, "prompt_size", "prompt_time", batch_size="1"),
                "decode": medians(gpu, "batch_size", "token_time", prompt_size="512"),
            }
            for name, gpu in machines.items()
        },
    }


def compiled() -> dict:
    """Which matrix instructions the attention kernels become."""
    program = (
        "import json, sys; sys.path.insert(0, 'tools'); import kernel_report as k; "
        f"found = [r for n in {COMPILED} for t in {tuple(TARGETS)} for r in k.compile_case(n, t)]; "
        "print(json.dumps([k.triton.__version__, found]))"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    version, found = json.loads(run.stdout.splitlines()[-1])
    keys = ("kernel", "gpu", "matrix")
    return {
        "what": "matrix instructions in the compiled attention kernels, head dimension 128, fp16",
        "machine": "compiled by Triton on a CPU for the GPU named; nothing was run",
        "cite": "tools/kernel_report.py",
        "triton": version,
        "date": datetime.now(UTC).date().isoformat(),
        "rows": [dict(zip(keys, (r["kernel"], TARGETS[r["target"]], r["matrix"]), strict=True)) for r in found],
    }


MADE = {f"linear_{name}": lambda name=name: linear_layers(name) for name in MODELS} | {"llama2_70b": whole_model}


@pytest.mark.parametrize("name", MADE)
def test_tables_follow_from_the_measurements(name):
    if not MEASURED.is_dir():
        pytest.skip("the published measurements are not here: shared/data/measured")
    assert recorded.load(name) == MADE[name]()


def test_kernels_still_compile_to_that():
    pytest.importorskip("triton")
    date = recorded.load("matrix_instructions")["date"]
    assert recorded.load("matrix_instructions") == compiled() | {"date": date}  # of the day when the table was made


def test_every_table_names_its_source():
    tables = {file.stem: recorded.load(file.stem) for file in (ROOT / "cbref" / "recorded").glob("*.json")}
    made_here = {*MADE, "matrix_instructions"}
    assert made_here <= set(tables)
    for name in set(tables) - made_here:
        assert (ROOT / "benchmarks" / f"{name}.py").exists(), f"nothing makes {name}"
    for name, table in tables.items():
        assert table["cite"] and table["what"], name
        if name == "matrix_instructions":
            assert datetime.fromisoformat(table["date"]) and re.fullmatch(r"\d+\.\d+\.\d+", table["triton"])
        else:
            assert table["licence"] in ("MIT", "CC BY 4.0") and table["url"] and table["left_out"], name
            assert table["cite"].endswith(f" {table['published']}"), name


def test_the_figures_of_the_fact_sheet():
    """C10, C20: 8.8 ms at 1 token, 9.2 at 8, 10.1 at 32; flat to 64, then 1.4, 2.0 and 3.6 times."""
    table = recorded.load("linear_a100_llama3_8b")
    ms = dict(zip(table["tokens"], table["ms"], strict=True))
    assert [round(ms[n], 1) for n in (1, 8, 32)] == [8.8, 9.2, 10.1]
    assert [round(ms[n] / ms[1], 1) for n in (64, 128, 256, 512)] == [1.2, 1.4, 2.0, 3.6]


def test_an_unknown_table():
    with pytest.raises(ValueError, match="linear_a100_llama3_8b"):
        recorded.load("nothing")


if __name__ == "__main__":
    for name, make in (MADE | {"matrix_instructions": compiled}).items():
        path = ROOT / "cbref" / "recorded" / f"{name}.json"
        path.write_text(json.dumps(make(), indent=1) + "\n", encoding="utf-8")
