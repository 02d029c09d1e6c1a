"""Figures, drawn from an engine's own records. Words come from ``cbref.strings``; there is none in the code.

``serving`` has what every chapter uses, and its functions can be imported from here. Other modules belong to one topic.
"""

from cbref.plots.serving import (
    batch_composition,
    batch_scaling,
    kv_memory,
    latencies,
    load_curve,
    slot_timeline,
    token_times,
)

__all__ = ["batch_composition", "batch_scaling", "kv_memory", "latencies", "load_curve", "slot_timeline", "token_times"]
