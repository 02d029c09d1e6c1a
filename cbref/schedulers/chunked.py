"""Chunked prefill: prompts are cut, so that no step gets long and decodes go on beside them."""

from cbref.request import Request, Status
from cbref.schedulers.base import Scheduler


class SarathiScheduler(Scheduler):
    """Stall-free batching (Sarathi-Serve, Agrawal et al., OSDI 2024; vLLM V1).

    Every running decode first, then chunks of any number of prompts, until the token budget is spent.
    """

    chunked = True

    def __init__(
        self, max_num_seqs: int = 8, max_num_batched_tokens: int = 512, admission: str = "optimistic", **options
    ):
        super().__init__(max_num_seqs, max_num_batched_tokens, admission=admission, **options)


class Sarathi2023Scheduler(Scheduler):
    """The first SARATHI (Agrawal et al., 2023): exactly one chunk of one prompt a step, and the decodes ride along."""

    chunked = True

    def __init__(self, max_num_seqs: int = 8, chunk_size: int = 256, admission: str = "optimistic", **options):
        super().__init__(max_num_seqs, chunk_size=chunk_size, admission=admission, **options)

    def line_up(self) -> list[Request]:
        everyone = super().line_up()
        first = next((r for r in everyone if r.status is Status.PREFILL), None)
        return [r for r in everyone if r.status is Status.DECODE or r is first]
