#!/usr/bin/env python
"""Compile every kernel for GPUs that are not here, and say what the machine code needs.

    python tools/kernel_report.py [--targets 75 80 89 90] [--only decode] [--json FILE]

The kernels' own Python sides are called with CPU tensors; instead of launching, Triton compiles for the named target.
So the configurations are those that ship. Registers, local memory (spills), shared memory, matrix instructions and the
widths of global loads are read from the compiled code with the tools that Triton's wheel carries. ``loads`` has the
widths in bits, and how many loads have them, for each pointer argument that is loaded from.
"""

from __future__ import annotations

import argparse
import importlib
import json
import linecache
import os
import re
import subprocess
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import torch
import triton
from tabulate import tabulate
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from cbref_kernels import common

TARGETS = (75, 80, 89, 90)
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
KERNELS = Path(common.__file__).parent
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
HEADS = {64: (9, 3), 80: (8, 8), 96: (20, 4), 128: (32, 4), 256: (8, 1)}  # head dimension: query and key heads


class NoGPU:
    """Stands in for Triton's driver: any target, no device."""

    def __init__(self, target: int):
        self.target = target

    def get_current_target(self):
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self):
        return self.target  # Triton keeps what it compiled by device

    def get_current_stream(self, device):
        return 0


def launches(call, target: int) -> list:
    """The kernels that ``call()`` would launch on a GPU of this compute capability, compiled."""
    seen, run = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        seen.append(run(self, *args, grid=grid, warmup=True, **options))

    triton.runtime.driver.set_active(NoGPU(target))
    common.CPU_STANDS_FOR = divmod(target, 10)
    JITFunction.run = compile_only
    try:
        call()
    finally:
        JITFunction.run = run
    return seen


def measure(kernel, target: int) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _tool("nvdisasm", "-c", "-g", file.name)  # -g: with the source line of each instruction
    usage = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    operations = Counter(re.findall(r"\b(HGMMA|HMMA|LDGSTS|LDG|UTMALDG)\b", code))
    wide = len(re.findall(r"\b(?:LDG|LDGSTS)\.\S*\b128\b", code))
    matrix = "wgmma" if operations["HGMMA"] else "mma" if operations["HMMA"] else "none"
    return {
        "kernel": kernel.name, "target": target, "shared_bytes": kernel.metadata.shared, "registers": usage["REG"],
        "spilled_bytes": usage["STACK"] + usage["LOCAL"], "warps": kernel.metadata.num_warps,
        "stages": kernel.metadata.num_stages, "matrix": matrix, "wide_loads": wide,
        "narrow_loads": operations["LDG"] + operations["LDGSTS"] - wide, "loads": _loads(code),
    }  # fmt: skip


def _loads(code: str) -> dict[str, dict[str, int]]:
    """Pointer argument -> width of a load in bits -> number of such loads; "" for what no argument's load became."""
    widths: dict[str, Counter] = {}
    pointer = ""
    for line in code.splitlines():
        if found := re.search(r'//## File "(.*?)", line (\d+)', line):
            # By name: Triton's own cache may hold code that a copy of this kernel in another folder became.
            source = linecache.getline(str(KERNELS / Path(found[1]).name), int(found[2]))
            load = re.search(r"tl\.load\((\w+)", source)
            pointer = load[1] if load else ""
        elif found := re.search(r"\b(?:LDG|LDGSTS)\b((?:\.\w+)*)", line):
            width = re.search(r"\.[US]?(8|16|64|128)\b", found[1])
            widths.setdefault(pointer, Counter())[width[1] if width else "32"] += 1
    return widths


def _tool(name: str, *args: str) -> str:
    return subprocess.run([TOOLS / name, *args], capture_output=True, text=True, check=True).stdout


def _call(name: str, *args):
    """``cbref_kernels.<name>.<name>(*args)``, for later."""
    return lambda: getattr(importlib.import_module(f"cbref_kernels.{name}"), name)(*args)


def cases() -> dict[str, object]:
    """What to compile: name -> a call of a kernel's Python side."""
    found = {}
    for dtype_name, dtype in DTYPES.items():
        for hidden in (576, 4096):
            x, weight = torch.zeros(2, hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
            found[f"rmsnorm {hidden} {dtype_name}"] = _call("rmsnorm", x, weight, 1e-5)
            found[f"rmsnorm+residual {hidden} {dtype_name}"] = _call("rmsnorm", x, weight, 1e-5, x)
        for dim, (query_heads, key_heads) in HEADS.items():
            q = torch.zeros(4, query_heads, dim, dtype=dtype)
            k = v = torch.zeros(4, key_heads, dim, dtype=dtype)
            cache = torch.zeros(8, 16, key_heads, dim, dtype=dtype)
            angles = torch.zeros(4, dim, dtype=dtype)
            table = torch.zeros(2, 2048, dtype=torch.int32)
            context = torch.ones(2, dtype=torch.int32)
            starts = torch.zeros(3, dtype=torch.int32)
            label = f"{dim} {dtype_name}"
            found[f"rope {label}"] = _call("rope", q, k, angles, angles)
            found[f"kv_write {label}"] = _call("kv_write", k, v, cache, cache, torch.zeros(4).long())
            prefill = (q, k, v, cache, cache, table, context, starts, 1000, 0.1)
            found[f"prefill {label}"] = _call("prefill_attention", *prefill)
            found[f"mixed {label}"] = _call("mixed_attention", q, cache, cache, table, context, starts, 0.1)
            for splits in (1, 8):
                decode = (q[:2], cache, cache, table, context, 0.1, splits)
                found[f"decode/{splits} {label}"] = _call("decode_attention", *decode)
    return found


def compile_case(name: str, target: int) -> list[dict]:
    torch.set_num_threads(1)
    return [{"case": name, **measure(kernel, target)} for kernel in launches(cases()[name], target)]


def report(targets=TARGETS, only: str = "") -> list[dict]:
    # The T4 (75) has no bfloat16.
    jobs = [(name, t) for name in cases() for t in targets if only in name and not (t == 75 and "bf16" in name)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        rows = list(tqdm(pool.map(compile_case, *zip(*jobs, strict=True)), total=len(jobs), desc="compile"))
    return [row for some in rows for row in some]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="*", type=int, default=TARGETS, help="compute capabilities, such as 80 90")
    parser.add_argument("--only", default="", help="a part of the cases' names")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    result = report(options.targets, options.only)
    for row in (table := [dict(row) for row in result]):
        loads = row["loads"].items()
        row["loads"] = ", ".join(f"{name} {n}x{bits}" for name, widths in loads for bits, n in widths.items())
    print(tabulate(table, headers="keys"))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
