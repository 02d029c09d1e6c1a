"""What a part of the benchmark says, and how parts are run so that one that fails loses no other."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from tabulate import tabulate
from tqdm import tqdm


@dataclass
class Row:
    """One figure. ``verdict``: pass or fail of a check, met or missed of a target, "not run: why", or nothing."""

    what: str
    value: float | None = None
    unit: str = ""
    target: str = ""
    verdict: str = ""
    raw: dict = field(default_factory=dict)  # what the figure was computed from


def check(what: str, error: float, bound: float, **raw) -> Row:
    """An error that must not exceed its bound; a NaN does."""
    return Row(what, error, "", f"≤ {bound:g}", "pass" if error <= bound else "fail", raw)


def goal(what: str, value: float, unit: str, at_least: float, **raw) -> Row:
    return Row(what, value, unit, f"≥ {at_least:g} {unit}", "met" if value >= at_least else "missed", raw)


def figure(what: str, value: float, unit: str, **raw) -> Row:
    return Row(what, value, unit, raw=raw)


def not_run(what: str, why: str) -> Row:
    return Row(what, verdict=f"not run: {why}")


def attempt(what: str, rows: Iterator[Row]) -> Iterator[Row]:
    """The rows of a piece of a part. If it raises, the rest of the part goes on all the same."""
    try:
        yield from rows
    except Exception as error:
        yield Row(what, verdict=f"failed: {_named(error)}", raw={"traceback": traceback.format_exception(error)})


@dataclass
class Part:
    name: str
    run: Callable[..., Iterator[Row]]  # with the machine
    seconds: float  # what it takes on a GPU, about: with less time left it is not begun


def run_parts(parts: list[Part], machine, seconds: float, progress: bool = True) -> dict[str, dict]:
    """Run parts in their order within ``seconds``; name -> status, rows, and for a failed part what was raised.

    A part that raises keeps the rows that it yielded before. ``machine.until`` tells a part when it should be done.
    """
    deadline, report = time.perf_counter() + seconds, {}
    bar = tqdm(parts, unit="part", **({} if progress else {"disable": True}))
    for i, part in enumerate(bar):
        bar.set_description(part.name)
        begin, rows = time.perf_counter(), []
        machine.until = deadline - sum(later.seconds for later in parts[i + 1 :])
        report[part.name] = entry = {"status": "ok", "rows": rows}
        if deadline - begin < part.seconds:
            why = f"{max(0, deadline - begin):.0f} s are left, and it takes about {part.seconds:g} s"
            entry["status"] = f"not run: {why}"
            rows.append(not_run("all of it", why))
            continue
        try:
            for row in part.run(machine):
                rows.append(row)
            if any(row.verdict.startswith("fail") for row in rows):
                entry["status"] = "failed"
            elif rows and all(row.verdict.startswith("not run") for row in rows):
                entry["status"] = rows[0].verdict
        except Exception as error:
            _failed(entry, error)
        try:  # a kernel that wrote where it must not may be noticed only now
            machine.release()
        except Exception as error:
            _failed(entry, error)
        entry["seconds"] = time.perf_counter() - begin
    return report


def _failed(entry: dict, error: Exception) -> None:
    entry["status"] = "failed"
    if "error" not in entry:  # the first is the cause
        entry["error"] = _named(error)
        entry["traceback"] = traceback.format_exception(error)


def tracebacks(part: dict) -> list[str]:
    """Of all that was raised in a part."""
    found = [row.raw["traceback"] for row in part["rows"] if "traceback" in row.raw] + [part.get("traceback", [])]
    return ["".join(lines) for lines in found if lines]


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def as_json(value):
    """Rows as dictionaries; numbers that JSON does not have as text."""
    if isinstance(value, Row):
        return as_json(asdict(value))
    if isinstance(value, dict):
        return {key: as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def table(report: dict[str, dict]) -> str:
    lines = []
    for name, part in report.items():
        for row in part["rows"]:
            value = "" if row.value is None else f"{row.value:,.0f}" if row.value >= 1000 else f"{row.value:.3g}"
            lines.append([name, row.what, value, row.unit, row.target, _short(row.verdict)])
        if "error" in part:
            lines.append([name, "", "", "", "", _short(f"failed: {part['error']}")])
    headers = ["part", "what", "figure", "unit", "target", "verdict"]
    return tabulate(lines, headers, disable_numparse=True, colalign=("left", "left", "right"))


def _short(text: str) -> str:
    return (text.splitlines() or [""])[0][:100]
