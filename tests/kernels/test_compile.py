"""Every kernel in every configuration, compiled for GPUs that are not here: what the machine code needs."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/kernel_report.py"
SHARED = {75: 64 << 10, 80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # bytes of a block, CUDA programming guide
ATTENTION = ("decode", "prefill", "mixed")


@pytest.fixture(scope="module")
def rows(request):
    """One row for each launch. Compiling takes minutes, so it is kept as long as neither kernels nor Triton change."""
    code = b"".join(path.read_bytes() for path in sorted([*(ROOT / "kernels").glob("*.py"), TOOL]))
    key = f"kernels/{triton.__version__}-{hashlib.sha256(code).hexdigest()}"
    found = request.config.cache.get(key, None)
    if found is None:
        out = request.config.cache.mkdir("kernels") / "report.json"
        run = subprocess.run(
            [sys.executable, TOOL, "--json", out],
            capture_output=True,
            text=True,
            env=os.environ | {"TQDM_DISABLE": "1"},
        )
        assert run.returncode == 0, run.stderr[-3000:]
        found = json.loads(out.read_text())
        request.config.cache.set(key, found)
    return found


def complaints(rows, wrong):
    return [f"{r['case']} on sm_{r['target']}: {r}" for r in rows if wrong(r)]


def test_every_kernel_is_there_for_every_target(rows):
    """Each file of kernels/, each head dimension, each type: on all GPUs that have the type."""
    seen = defaultdict(set)
    for row in rows:
        name, _, dtype = row["case"].split()
        seen[name.split("/")[0].split("+")[0], dtype].add((row["target"], row["case"]))
    files = {p.stem.removesuffix("_attention") for p in (ROOT / "kernels").glob("*.py")} - {"common"}
    assert {name for name, _ in seen} == files
    for (_, dtype), found in seen.items():
        assert {t for t, _ in found} == ({80, 89, 90} if dtype == "bf16" else {75, 80, 89, 90})
    dims = {row["case"].split()[1] for row in rows if row["case"].startswith("decode")}
    assert dims == {"64", "80", "96", "128", "256"}


def test_shared_memory_fits(rows):
    assert complaints(rows, lambda r: r["shared_bytes"] > SHARED[r["target"]]) == []


def test_no_register_is_spilled(rows):
    assert complaints(rows, lambda r: r["spilled_bytes"] > 0) == []


def test_registers_leave_room_for_all_warps(rows):
    """65,536 registers a multiprocessor: a launch that needs more fails on the GPU, not here."""
    assert complaints(rows, lambda r: r["registers"] * r["warps"] * 32 > 65536) == []


def test_attention_multiplies_on_tensor_cores_from_ampere_on(rows):
    attention = [r for r in rows if r["case"].startswith(ATTENTION) and "join" not in r["kernel"]]
    # Queries in tiles, fp32, 256 dimensions: multiplied without them, since three-part products find no registers.
    attention = [r for r in attention if r["case"] not in ("prefill 256 fp32", "mixed 256 fp32") or r["target"] == 75]
    assert complaints(attention, lambda r: r["target"] >= 80 and r["matrix"] == "none") == []
    assert {r["matrix"] for r in attention if r["target"] == 75} == {"none"}, "the T4's fallback is needed no more"


def test_prefill_uses_warp_group_instructions_on_hopper(rows):
    prefill = [r for r in rows if r["case"].startswith("prefill") and r["target"] == 90 and "fp32" not in r["case"]]
    assert len(prefill) == 10 and complaints(prefill, lambda r: r["matrix"] != "wgmma") == []


def test_keys_and_values_are_loaded_128_bits_at_a_time(rows):
    """Each load of each of these pointers. An offset that may be no multiple of 16 bytes narrows them."""
    pointers = {"decode": ["key_cache", "value_cache"], "mixed": ["key_cache", "value_cache"]}
    pointers["prefill"] = ["key_cache", "value_cache", "k", "v"]
    attention = [r for r in rows if r["case"].startswith(ATTENTION) and "join" not in r["kernel"]]
    wrong = [
        f"{row['case']} on sm_{row['target']}: {pointer} {row['loads'].get(pointer)}"
        for row in attention
        for pointer in pointers[re.split("[/ ]", row["case"])[0]]
        if set(row["loads"].get(pointer, ())) != {"128"}
    ]
    assert wrong == []


def test_what_else_is_loaded_is_little(rows):
    """Block tables and lengths, 32 bits each: a dozen loads, or half as many as wide ones."""
    attention = [r for r in rows if r["case"].startswith(ATTENTION) and "join" not in r["kernel"]]
    assert complaints(attention, lambda r: r["narrow_loads"] > max(13, r["wide_loads"] / 2)) == []


def test_the_write_into_the_cache_reads_128_bits_at_a_time(rows):
    writes = [r for r in rows if r["case"].startswith("kv_write")]
    assert complaints(writes, lambda r: any(set(r["loads"].get(p, ())) != {"128"} for p in ("k_ptr", "v_ptr"))) == []


STEPS_OF_ALL_KINDS = """
import json, sys
import torch
from kernel_report import launches
from cbref_kernels.decode_attention import decode_attention
from cbref_kernels.mixed_attention import mixed_attention
from cbref_kernels.prefill_attention import prefill_attention

def cut(size, first):
    return torch.zeros(first + size, dtype=torch.int32)[first:]

compiled = {}
cache = torch.zeros(8, 16, 3, 64, dtype=torch.float16)
for chunks, width, first, splits in ((1, 1, 0, 2), (2, 16, 1, 16), (16, 33, 2, 64), (17, 48, 3, 17)):
    q, k = torch.zeros(chunks, 9, 64, dtype=torch.float16), torch.zeros(chunks, 3, 64, dtype=torch.float16)
    table, context = cut(chunks * width, first).view(chunks, width), cut(chunks, first)
    starts = cut(chunks + 1, first)
    for call in (
        lambda: decode_attention(q, cache, cache, table, context, 0.1, splits),
        lambda: prefill_attention(q, k, k, cache, cache, table, context, starts, 1, 0.1),
        lambda: mixed_attention(q, cache, cache, table, context, starts, 0.1),
    ):
        for kernel in launches(call, 80):
            compiled.setdefault(kernel.name, set()).add(kernel.hash)
json.dump({name: len(hashes) for name, hashes in compiled.items()}, sys.stdout)
"""


def test_no_step_compiles_a_kernel_again():
    """Whatever the number of requests, the width of the table, and where a step's metadata begins. The join is compiled
    for each power of two of splits."""
    environment = os.environ | {"PYTHONPATH": str(TOOL.parent), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", STEPS_OF_ALL_KINDS]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    versions = json.loads(run.stdout)
    assert versions.pop("_join_kernel") == 4  # 2, 16, 32 and 64
    assert versions == {"_attend_kernel": 1, "_prefill_kernel": 1, "_mixed_kernel": 1}
