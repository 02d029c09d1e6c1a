"""Decode steps as CUDA graphs.

A decode step is hundreds of small kernels, and the CPU needs longer to launch them than a GPU to run them. A CUDA graph
records the launches once and repeats them with one call. Sizes and addresses are frozen then, so steps are padded to
buckets, and the numbers that change (ids, places, block tables) are copied into the memory that the graph reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch

from cbref.attention import StepShape
from cbref.request import Chunk


def to_device(row: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for: only pinned memory can be copied while the program goes on."""
    tensor = torch.from_numpy(row)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class DecodeGraphs:
    """One graph for each bucket, captured at its first step, for the life of the executor.

    forward  (numbers on the device, shape) -> logits
    strict   raise when a step cannot be captured; else it runs without a graph, and a warning says so
    capture  function -> (replay, output); ``CudaCapture``, unless a test stands in for the GPU
    """

    def __init__(self, forward: Callable, device: torch.device, strict: bool = False, capture: Callable | None = None):
        self._forward, self._device, self._strict = forward, device, strict
        self._capture = capture or CudaCapture()
        self._captured: dict[tuple[int, int], tuple[torch.Tensor, Callable, torch.Tensor] | None] = {}
        self._logits: torch.Tensor | None = None  # of the last step, whichever graph made them

    @staticmethod
    def bucket(chunks: list[Chunk], block_size: int) -> tuple[int, int]:
        """Requests and blocks of the longest context, rounded up: to 1, 2, 4, then multiples of 8; to powers of two."""
        n, blocks = len(chunks), -(-max(c.stop for c in chunks) // block_size)
        requests = _power_of_two(n) if n <= 8 else -(-n // 8) * 8
        return requests, _power_of_two(blocks)

    def __call__(self, row: np.ndarray, shape: StepShape) -> torch.Tensor:
        """Logits [requests of the bucket, vocabulary]; overwritten by the next call."""
        key = (shape.chunks, shape.width)
        numbers = to_device(row, self._device)
        if key not in self._captured:
            static = numbers.clone()
            try:
                self._captured[key] = (static, *self._capture(lambda: self._run(static, shape)))
            except RuntimeError as error:  # out of memory, or an operation that a graph cannot hold
                if self._strict:
                    raise
                warnings.warn(f"{shape.chunks} decodes run without a CUDA graph: {error}", stacklevel=2)
                self._captured[key] = None
        if self._captured[key] is None:
            return self._forward(numbers, shape)
        static, replay, logits = self._captured[key]
        static.copy_(numbers)
        replay()
        return logits

    def _run(self, numbers: torch.Tensor, shape: StepShape) -> torch.Tensor:
        """A forward pass whose logits go where all graphs put theirs: they are large, and one step's are enough."""
        logits = self._forward(numbers, shape)
        if self._logits is None or len(self._logits) < len(logits):  # in the run before the recording
            self._logits = torch.empty_like(logits)
        return self._logits[: len(logits)].copy_(logits)


class CudaCapture:
    """Records what a function launches. The graphs share one pool of memory, since only one runs at a time.

    One stream records them all, since libraries keep a workspace for each stream that they meet.
    """

    def __init__(self):
        self._stream = self._pool = None

    def __call__(self, function: Callable) -> tuple[Callable, torch.Tensor]:
        current = torch.cuda.current_stream()
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # the first run compiles kernels and sets up libraries: not for a graph
            function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:  # what other threads do with the GPU is no part of the graph, and no error
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                output = function()
        finally:  # a failed recording leaves its stream current
            torch.cuda.set_stream(current)
        return graph.replay, output


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
