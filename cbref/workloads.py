"""Requests to serve: what arrives, when, and how long its answer will be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cbref.request import SamplingParams

# The source document's three examples, as numbers of output tokens a request. All arrive at once.
DOCUMENT = {"convoy": (10, 25, 15, 100), "interactive": (4, 2, 6, 3, 5, 2), "scheduler": (5, 10, 15, 20, 25, 30)}

# Every 5th percentile of GeneratedTokens in the Azure LLM inference trace 2023, conversation.
# Patel et al., Splitwise, ISCA 2024; data CC-BY 4.0.
AZURE_CONV_OUTPUT = (7, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451, 1000)

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "A recipe for tomato soup: first,",
    "The three laws of thermodynamics say that",
    "Dear customer, thank you for your letter. We",
    "def fibonacci(n):",
    "The difference between a virus and a bacterium is that",
    "In 1969, two people walked on the Moon. They",
)


@dataclass(frozen=True)
class Workload:
    """Prompts with their parameters, and arrival times in seconds, in the order of arrival."""

    prompts: list[str] | list[Sequence[int]]
    params: list[SamplingParams]
    arrivals: list[float]

    def __len__(self) -> int:
        return len(self.prompts)

    def submit(self, engine) -> list:
        """Queue everything at its time of arrival, counted from now; returns the requests."""
        now = engine.executor.now()
        return [
            engine.add_request(prompt, params, arrival=now + arrival)
            for prompt, params, arrival in zip(self.prompts, self.params, self.arrivals, strict=True)
        ]


def of_lengths(output_lengths: Sequence[int], prompt_length: int = 1) -> Workload:
    """Requests of the given output lengths with made-up prompts, all at time 0: for simulated engines."""
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in output_lengths]
    return Workload([range(prompt_length)] * len(params), params, [0.0] * len(params))


def chat(num_requests: int = 32, seed: int = 0, scale: float = 0.125) -> Workload:
    """Real prompts, all at time 0, with output lengths drawn from the Azure conversation trace times ``scale``.

    The default scale brings a median of 129 tokens to 16, for laptops. Outputs run to their length (``ignore_eos``), so
    that every policy does the same work.
    """
    if num_requests < 1 or not scale > 0:
        raise ValueError(f"{num_requests} requests at scale {scale}; both must be above 0")
    rng = np.random.default_rng(seed)
    grid = np.linspace(0, 1, len(AZURE_CONV_OUTPUT))
    lengths = np.maximum(1, np.rint(scale * np.interp(rng.random(num_requests), grid, AZURE_CONV_OUTPUT)).astype(int))
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(num_requests)]
    return Workload(
        prompts, [SamplingParams(max_tokens=int(n), ignore_eos=True) for n in lengths], [0.0] * num_requests
    )
