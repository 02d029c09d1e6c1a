"""Figures of what an engine did, drawn from its own records. Words come from ``cbref.strings``, group "plots".

Colours are Okabe and Ito's, which the colour-blind can tell apart; letters and hatching carry the meaning without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from cbref.metrics import RequestMetrics, StepRecord
from cbref.request import Completion
from cbref.strings import load

PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#0072B2", "#999999")
STYLES = ("-", "--", "-.", ":")
HATCHED = {"facecolor": "#f4f4f4", "edgecolor": "#9a9a9a", "hatch": "////", "linewidth": 0.0}
TITLE_ROOM = 0.3  # inches


def titled(fig: Figure, title: str) -> Figure:
    """The figure with a title at its upper left: captions are metadata, which JupyterLab, Colab and GitHub do not show.

    The figure grows, so that its panels keep their size.
    """
    fig.set_figheight(fig.get_figheight() + TITLE_ROOM)
    fig.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return fig


def slot_timeline(
    runs: Mapping[str, Sequence[StepRecord]], slots: int, *, clock: str = "step", names: Mapping[str, str] | None = None
) -> Figure:
    """A Gantt chart of slots, one panel a run: who sits in which slot, and which slot-iterations were wasted.

    runs   the policy's name, or a title of your own -> ``engine.steps``; one panel each, one below the other
    clock  "step" (every iteration one unit wide) or "seconds"
    names  request id -> short label in the bars; none: A, B, C, … in order of appearance
    """
    words = load("plots")
    fig, panels = plt.subplots(
        len(runs),
        1,
        figsize=(9, 0.7 + len(runs) * (0.8 + 0.33 * slots)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    right = 0.0
    for axes, (title, steps) in zip(panels[:, 0], runs.items(), strict=True):
        right = max(right, _draw_slots(axes, steps, slots, clock, names or _letters(steps)))
        axes.set_title(words.get(f"run_{title}", title), loc="left", fontsize=10)
        axes.set_yticks(range(slots), [words["slot"].format(slot=i + 1) for i in range(slots)])
        axes.set_ylim(slots - 0.45, -0.55)
    axes.set_xlim(0, right)
    axes.set_xlabel(words["seconds" if clock == "seconds" else "step"])
    handles = [
        Patch(label=words["wasted"], **{**HATCHED, "linewidth": 0.5}),
        Patch(label=words["prefill"], facecolor="white", edgecolor="black", linewidth=1.6),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return titled(fig, words["title_slot_timeline"])


def _draw_slots(axes: Axes, steps: Sequence[StepRecord], slots: int, clock: str, names: Mapping[str, str]) -> float:
    """Steps of one request in one slot become one bar; what no bar covers is hatched. Returns where the run ends."""
    zero = steps[0].begin
    span = {s.index: (s.begin - zero, s.end - zero) if clock == "seconds" else (i, i + 1) for i, s in enumerate(steps)}
    right = span[steps[-1].index][1]
    for slot in range(slots):
        axes.barh(slot, right, left=0, height=0.78, **HATCHED)
    bars: dict[tuple[int, str], list] = {}
    for step in steps:
        for share in step.shares:
            bars.setdefault((share.slot, share.request_id), []).append((span[step.index], share.prefill))
    colours = {request: PALETTE[i % len(PALETTE)] for i, request in enumerate(dict.fromkeys(r for _, r in bars))}
    for (slot, request), parts in bars.items():
        left, end = parts[0][0][0], parts[-1][0][1]
        axes.barh(slot, end - left, left=left, height=0.78, color=colours[request], edgecolor="black", linewidth=0.6)
        for (begin, stop), prefill in parts:
            if prefill:
                axes.barh(slot, stop - begin, left=begin, height=0.78, fill=False, edgecolor="black", linewidth=1.6)
        if (end - left) / right > 0.012 * len(names[request]):
            axes.text((left + end) / 2, slot, names[request], ha="center", va="center", fontsize=8, clip_on=True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    return right


def _letters(steps: Sequence[StepRecord]) -> dict[str, str]:
    order = dict.fromkeys(share.request_id for step in steps for share in step.shares)
    return {request: chr(65 + i) if len(order) <= 26 else str(i) for i, request in enumerate(order)}


def kv_memory(runs: Mapping[str, Sequence[StepRecord]]) -> Figure:
    """Tokens' worth of KV blocks that are reserved, and those that hold a token, step by step; one panel a run."""
    words = load("plots")
    fig, panels = plt.subplots(1, len(runs), figsize=(9, 3), sharey=True, squeeze=False, layout="constrained")
    for axes, (title, steps) in zip(panels[0], runs.items(), strict=True):
        index = np.arange(len(steps))
        reserved, live = [s.kv_reserved for s in steps], [s.kv_live for s in steps]
        axes.fill_between(index, reserved, step="post", label=words["kv_reserved"], **HATCHED)
        axes.fill_between(
            index, live, step="post", color=PALETTE[0], edgecolor="black", linewidth=0.4, label=words["kv_live"]
        )
        axes.set_title(words.get(f"run_{title}", title), loc="left", fontsize=10)
        axes.set_xlabel(words["step"])
        axes.margins(x=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylabel(words["kv_tokens"])
    panels[0, -1].legend(frameon=False, fontsize=9)
    return titled(fig, words["title_kv_memory"])


def token_times(runs: Mapping[str, Sequence[Completion]], *, clock: str = "seconds") -> Figure:
    """When each request waited, got its tokens, and was sent back: one row a request, one panel a run.

    clock  what the engine's clock counted: "seconds", or "step" where every step took one unit
    Up to eight requests are A, B, C, … in the order given; more have numbers, from 0.
    """
    words = load("plots")
    tallest = max(len(completions) for completions in runs.values())
    fig, panels = plt.subplots(
        1, len(runs), figsize=(9, 1.2 + 0.16 * tallest), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (title, completions) in zip(panels[0], runs.items(), strict=True):
        zero = min(c.metrics.arrival for c in completions)
        for row, c in enumerate(completions):
            m, times = c.metrics, np.asarray(c.metrics.token_times) - zero
            axes.plot(
                [m.arrival - zero, m.admitted - zero],
                [row, row],
                color="#9a9a9a",
                linestyle=":",
                linewidth=1.2,
                label=words["queued"] if row == 0 else None,
            )
            axes.plot(
                [m.admitted - zero, m.finished - zero],
                [row, row],
                color=PALETTE[0],
                linewidth=3,
                alpha=0.6,
                solid_capstyle="butt",
                label=words["in_batch"] if row == 0 else None,
            )
            axes.plot(
                times,
                [row] * len(times),
                "|",
                color="black",
                markersize=4,
                markeredgewidth=0.6,
                label=words["token"] if row == 0 else None,
            )
        axes.set_title(words.get(f"run_{title}", title), loc="left", fontsize=10)
        axes.set_xlabel(words["seconds" if clock == "seconds" else "step"])
        axes.set_xlim(left=0)
        axes.set_ylim(tallest - 0.4, -0.6)
        if tallest <= 8:
            axes.set_yticks(range(tallest), [chr(65 + row) for row in range(tallest)])
        else:
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylabel(words["requests_axis"])
    fig.legend(
        *panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    return titled(fig, words["title_token_times"])


def batch_scaling(batch_sizes: Sequence[int], step_seconds: Sequence[float]) -> Figure:
    """Time of a step and tokens per second over the batch size, both relative to the first batch size."""
    words = load("plots")
    sizes, ratio = np.asarray(batch_sizes) / batch_sizes[0], np.asarray(step_seconds) / step_seconds[0]
    fig, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    axes.plot(batch_sizes, ratio, "o-", color=PALETTE[5], label=words["step_time"])
    axes.plot(batch_sizes, sizes / ratio, "s-", color=PALETTE[6], label=words["throughput"])
    axes.plot(batch_sizes, sizes, ":", color="#777777", label=words["ideal"])
    axes.set(xlabel=words["batch_size"], ylabel=words["relative"], xticks=batch_sizes, ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return titled(fig, words["title_batch_scaling"])


def batch_composition(runs: Mapping[str, Sequence[StepRecord]]) -> Figure:
    """Tokens of prompts and of decodes in every step; one panel a run, one below the other."""
    words = load("plots")
    fig, panels = plt.subplots(len(runs), 1, figsize=(9, 0.8 + 1.6 * len(runs)), squeeze=False, layout="constrained")
    for axes, (title, steps) in zip(panels[:, 0], runs.items(), strict=True):
        decode = np.array([sum(s.stop - s.start for s in step.shares if not s.prefill) for step in steps])
        prefill = np.array([step.num_tokens for step in steps]) - decode
        index = np.arange(len(steps) + 1)
        axes.stairs(decode + prefill, index, fill=True, **HATCHED, label=words["prefill_tokens"])
        axes.stairs(decode, index, fill=True, color=PALETTE[0], edgecolor="black", label=words["decode_tokens"])
        axes.set_title(words.get(f"run_{title}", title), loc="left", fontsize=10)
        axes.set_ylabel(words["tokens_in_step"])
        axes.margins(x=0)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(words["step"])
    fig.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return titled(fig, words["title_batch_composition"])


def latencies(runs: Mapping[str, Sequence[RequestMetrics]]) -> Figure:
    """How TTFT and TBT are spread: the share of values at or below each, one curve a run. Seconds, logarithmic."""
    words = load("plots")
    fig, (first, between) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for i, (title, metrics) in enumerate(runs.items()):
        label = words.get(f"run_{title}", title)
        values = {first: [m.ttft for m in metrics if m.token_times], between: np.concatenate([m.tbt for m in metrics])}
        for axes, data in values.items():
            axes.ecdf(data, color=PALETTE[(5, 6, 2, 4)[i % 4]], linestyle=STYLES[i % len(STYLES)], label=label)
    for axes, name in ((first, "ttft"), (between, "tbt")):
        axes.set(xscale="log", xlabel=words[name])
        axes.spines[["top", "right"]].set_visible(False)
    first.set_ylabel(words["share"])
    between.legend(frameon=False, fontsize=9)
    return titled(fig, words["title_latencies"])


def load_curve(results: Mapping[str, Sequence[tuple[float, float]]], ylabel: str = "tbt_p99") -> Figure:
    """A latency over the load, one curve a policy: ``results`` maps a policy to (requests per second, seconds)."""
    words = load("plots")
    fig, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for i, (title, points) in enumerate(results.items()):
        rate, seconds = zip(*points, strict=True)
        style = {"color": PALETTE[(5, 6, 2, 4)[i % 4]], "linestyle": STYLES[i % len(STYLES)], "marker": "os^D"[i % 4]}
        axes.plot(rate, seconds, label=words.get(f"run_{title}", title), **style)
    axes.set(xlabel=words["rate"], ylabel=words.get(ylabel, ylabel), yscale="log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return titled(fig, words["title_load_curve"])
