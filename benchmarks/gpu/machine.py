"""The machine that is measured: its name, its peaks, and how a function is timed on it."""

from __future__ import annotations

import gc
import math
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import cached_property

import torch
from triton.testing import do_bench

from cbref.executors.graphs import CudaCapture
from cbref_kernels.common import capability

NO_GPU = "no GPU"


class Machine:
    """A GPU, or a CPU on which sizes are tiny and kernels are interpreted.

    dtype  of the speed measurements: bfloat16, or float16 where the GPU has none; on a CPU float32
    until  clock time by which the running part should be done
    """

    def __init__(self):
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.tensor_cores = self.cuda and capability(self.device) >= (8, 0)  # those that Triton uses
        self.dtype = torch.bfloat16 if self.tensor_cores else torch.float16 if self.cuda else torch.float32
        self.until = math.inf
        self.kept: dict[str, object] = {}  # what later parts use again

    @property
    def time_left(self) -> float:
        return self.until - time.perf_counter()

    @staticmethod
    def release() -> None:
        """Give back what a part has left, so that the next one finds the memory."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def describe(self) -> dict | None:
        if not self.cuda:
            return None
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "name": properties.name,
            "compute_capability": ".".join(map(str, capability(self.device))),
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": _driver(),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def seconds(self, function: Callable, record: bool = True) -> float:
        """Median seconds of a call on the GPU, with an empty L2 cache.

        ``record``: as a CUDA graph, as the engine runs it. Else the CPU's launching counts where it is the slower one.
        """
        if record:
            function, _ = CudaCapture()(function)
        return do_bench(function, warmup=25, rep=100, return_mode="median") / 1e3

    @cached_property
    def copy_bandwidth(self) -> float:
        """Bytes/s of a large copy, read and written."""
        source = torch.empty(min(1 << 30, torch.cuda.mem_get_info()[0] // 4), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / self.seconds(lambda: target.copy_(source))

    @cached_property
    def matmul_rate(self) -> float:
        """FLOP/s of a large matrix product in ``dtype``."""
        n = 8192
        # random, for on zeros a GPU draws less power and is faster
        a, b = (torch.randn(n, n, device=self.device, dtype=self.dtype) for _ in range(2))
        return 2 * n**3 / self.seconds(lambda: a @ b)


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return said[0] if said else "unknown"
