"""A run as files that other programs read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from cbref.metrics import StepRecord


def chrome_trace(runs: Mapping[str, Sequence[StepRecord]], path: str | Path) -> None:
    """Write steps in the Chrome trace format, which Perfetto opens: a process for each run, a row for each slot."""
    events = []
    for process, (name, steps) in enumerate(runs.items()):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        zero = steps[0].begin if steps else 0.0
        for step in steps:
            begin, length = 1e6 * (step.begin - zero), 1e6 * (step.end - step.begin)
            for share in step.shares:
                events.append({
                    "ph": "X", "pid": process, "tid": share.slot, "ts": begin, "dur": length, "name": share.request_id,
                    "cat": "prefill" if share.prefill else "decode",
                    "args": {"step": step.index, "start": share.start, "stop": share.stop},
                })  # fmt: skip
            counters = {"waiting": step.waiting, "kv_live": step.kv_live, "tokens": step.num_tokens}
            for counter, value in counters.items():
                events.append({"ph": "C", "pid": process, "ts": begin, "name": counter, "args": {counter: value}})
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
