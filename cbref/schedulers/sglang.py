"""SGLang's default: prefill first, in the order of the longest cached prefix (Zheng et al., NeurIPS 2024)."""

from cbref.schedulers.base import Scheduler


class SglangScheduler(Scheduler):
    """Prefix caching, longest-prefix-match order, prompts cut at the budget, and prefill has the right of way.

    The order is that of the paper (Zheng et al., 2024); SGLang's server takes requests first come, first served today.

    mixed_chunk  let decodes ride along with the chunks; off by default, so that prompts still stall decodes
    """

    chunked = True

    def __init__(
        self,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 8192,
        order: str = "lpm",
        admission: str = "optimistic",
        prefix_caching: bool = True,
        mixed_chunk: bool = False,
        **options,
    ):
        self.mixed = mixed_chunk
        super().__init__(
            max_num_seqs,
            max_num_batched_tokens,
            order=order,
            admission=admission,
            prefix_caching=prefix_caching,
            **options,
        )
