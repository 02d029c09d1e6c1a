"""Figures beyond one token a step and one kind of GPU: guesses, what they bring, and phases on GPUs of their own.

Words come from ``cbref.strings``, group "plots_speculation"; labels of curves come from the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from cbref.plots.serving import PALETTE, titled
from cbref.strings import load

COLOURS = (PALETTE[6], PALETTE[5], PALETTE[2], PALETTE[4], PALETTE[1])
STYLES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "os^Dv"
GREY = "#777777"

Curve = tuple[Sequence[float], Sequence[float]]


def draft_lengths(kinds: Mapping[str, Sequence[tuple[int, float | None, float]]]) -> Figure:
    """Acceptance and tokens a step over the length of a guess, one curve a kind of text.

    kinds   label -> (length, share of guesses accepted or None, tokens a step) for each length
    """
    words = load("plots_speculation")
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.7), layout="constrained")
    for i, (label, points) in enumerate(kinds.items()):
        length, accepted, tokens = zip(*points, strict=True)
        tried = [(n, share) for n, share in zip(length, accepted, strict=True) if share is not None]
        if tried:
            _curve(left, i, label, *zip(*tried, strict=True))
        _curve(right, i, label, length, tokens)
    ticks = sorted({length for points in kinds.values() for length, _, _ in points})
    for axes, name in ((left, "acceptance"), (right, "per_step")):
        axes.set(xlabel=words["guesses"], ylabel=words[name], xscale="log")
        _ticks(axes.xaxis, [tick for tick in ticks if tick])
        axes.set_ylim(bottom=0)
    left.yaxis.set_major_formatter(PercentFormatter(1))
    fig.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return titled(fig, words["title_draft_lengths"])


def chunk_cost(curves: Mapping[str, Curve]) -> Figure:
    """Time of a step over the tokens that one request has in it, each curve relative to its first point."""
    words = load("plots_speculation")
    fig, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for i, (label, (x, y)) in enumerate(curves.items()):
        _curve(axes, i, label, x, np.asarray(y) / y[0])
    ticks = sorted({value for x, _ in curves.values() for value in x})
    axes.plot(ticks, ticks, color=GREY, linestyle=":", linewidth=1)
    axes.set(xlabel=words["chunk"], ylabel=words["relative"])
    axes.set_ylim(0, max(line.get_ydata().max() for line in axes.get_lines()[:-1]) * 1.15)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    fig.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return titled(fig, words["title_chunk_cost"])


def speedups(panels: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """Speedup over the batch size, one panel a setting and one curve a rate of acceptance; below 1 it is a loss."""
    words = load("plots_speculation")
    fig, plots = plt.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 3.9), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (title, curves) in zip(plots[0], panels.items(), strict=True):
        axes.axhspan(0, 1, color="#eeeeee", linewidth=0)
        for i, (label, (x, y)) in enumerate(curves.items()):
            _curve(axes, i, label, x, y)
        axes.axhline(1, color=GREY, linewidth=1)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set(xlabel=words["batch"], xscale="log", ylim=(0, None))
        _ticks(axes.xaxis, [1, 4, 16, 64, 256])
    plots[0, 0].set_ylabel(words["speedup"])
    plots[0, 0].text(1, 0.08, words["no_gain"], fontsize=9, color="#333333")
    fig.legend(*plots[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return titled(fig, words["title_speedups"])


def attainment(by_rate: Mapping[str, Curve], by_limit: Mapping[str, Curve]) -> Figure:
    """Share of requests that meet an SLO: over the rate of arrivals, and over the limit for token gaps (in seconds)."""
    words = load("plots_speculation")
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    for axes, curves, factor, name in ((left, by_rate, 1, "rate"), (right, by_limit, 1e3, "limit")):
        for i, (label, (x, y)) in enumerate(curves.items()):
            _curve(axes, i, label, factor * np.asarray(x), y)
        axes.set_xlabel(words[name])
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_ylim(0, 1.04)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_xscale("log")
    _ticks(right.xaxis, [10, 20, 50, 100, 200, 500])
    left.set_ylabel(words["attainment"])
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return titled(fig, words["title_attainment"])


def _curve(axes: Axes, i: int, label: str, x: Sequence[float], y: Sequence[float]) -> None:
    style = {"color": COLOURS[i % 5], "linestyle": STYLES[i % 5], "marker": MARKERS[i % 5], "markersize": 5}
    axes.plot(x, y, label=label, linewidth=2, **style)
    axes.spines[["top", "right"]].set_visible(False)


def _ticks(axis, ticks: Sequence[float]) -> None:
    low, high = axis.get_view_interval()
    axis.set_ticks([tick for tick in ticks if low <= tick <= high])
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
