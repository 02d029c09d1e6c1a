"""Prefill has the right of way (the first vLLM, Kwon et al., SOSP 2023; nano-vllm)."""

from cbref.schedulers.base import Scheduler


class PrefillFirstScheduler(Scheduler):
    """A step is all prefill or all decode. While prompts come in, every decode stands still: the stall."""

    mixed = False

    def __init__(self, max_num_seqs: int = 8, admission: str = "optimistic", **options):
        super().__init__(max_num_seqs, admission=admission, **options)
