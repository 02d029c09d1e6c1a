"""In-flight batching as TensorRT-LLM's capacity scheduler does it."""

from cbref.schedulers.base import Scheduler

CAPACITIES = {"guaranteed_no_evict": "reserve", "max_utilization": "optimistic"}


class TrtllmScheduler(Scheduler):
    """Decodes and prompts share a step under ``max_num_batched_tokens``.

    capacity         "guaranteed_no_evict" reserves to completion; "max_utilization" pauses the request begun last when
                     memory runs out, and computes it again
    chunked_context  cut prompts at the budget; off by default, as there: a prompt then has to fit into the budget
    static_batch     the same loop, but nobody is admitted before the whole batch has gone
    """

    def __init__(
        self,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16_384,
        capacity: str = "guaranteed_no_evict",
        chunked_context: bool = False,
        static_batch: bool = False,
        **options,
    ):
        if capacity not in CAPACITIES:
            raise ValueError(f"unknown capacity {capacity!r}; choose one of {', '.join(CAPACITIES)}")
        if "admission" in options:
            raise ValueError(f"admission is {options['admission']!r}, but capacity decides it here; leave it out")
        self.chunked, self.hold_batch = chunked_context, static_batch
        super().__init__(max_num_seqs, max_num_batched_tokens, admission=CAPACITIES[capacity], **options)
