"""Figures of chunked prefill: the stall, the trade, and what a chunk costs. Words: group "plots_chunks"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cbref.plots.serving import HATCHED, PALETTE, titled
from cbref.strings import load

SHADE = {"facecolor": "#fbe3bd", "edgecolor": "none"}


def stall_lanes(
    runs: Mapping[str, tuple[Sequence[Sequence[float]], float]], span: tuple[float, float] = (-0.15, 2.6)
) -> Figure:
    """Output tokens of the decodes around the arrival of a long prompt: one row a request, one panel a run.

    runs  title -> (times of each decode's tokens, TTFT of the long prompt); seconds since its arrival
    span  seconds shown
    """
    words = load("plots_chunks")
    fig, panels = plt.subplots(
        len(runs), 1, figsize=(6.4, 0.8 + 1.45 * len(runs)), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, (title, (times, ttft)) in zip(panels[:, 0], runs.items(), strict=True):
        axes.axvspan(0, ttft, **SHADE)
        shown = [[t for t in row if span[0] <= t <= span[1]] for row in times]
        axes.eventplot(shown, colors="black", linewidths=0.7, linelengths=0.8)
        axes.axvline(ttft, color=PALETTE[5], linewidth=1.6)
        axes.set_title(words.get(f"run_{title}", title), loc="left", fontsize=11)
        axes.set(xlim=span, ylim=(len(times) - 0.3, -0.7), yticks=[])
        axes.spines[["top", "right", "left"]].set_visible(False)
    fig.supylabel(words["requests"], fontsize=11)
    axes.set_xlabel(words["seconds"], fontsize=11)
    handles = [
        Line2D([], [], color="black", marker="|", linestyle="", markersize=9, label=words["token"]),
        Patch(label=words["prompt"], **SHADE),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    return titled(fig, words["title_stall_lanes"])


def trade(points: Mapping[int | None, tuple[float, float]], limit: float | None = None) -> Figure:
    """TTFT of a long prompt over the longest gap of those who decode beside it, one point a token budget.

    points  budget in tokens, or None for no limit -> (longest gap, TTFT), in seconds
    limit   a bound on the gap, in seconds, drawn as a line
    """
    words = load("plots_chunks")
    fig, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    gaps, firsts = np.array([*points.values()]).T
    axes.plot(1e3 * gaps, firsts, "o-", color=PALETTE[6], linewidth=1.6)
    for (budget, _), gap, first in zip(points.items(), gaps, firsts, strict=True):
        text = words["whole"] if budget is None else words["budget"].format(tokens=budget)
        axes.annotate(text, (1e3 * gap, first), (4, 7), textcoords="offset points", fontsize=9)
    if limit is not None:
        axes.axvline(1e3 * limit, color=PALETTE[5], linestyle="--", linewidth=1.4)
        axes.text(
            1e3 * limit, 0.97, " " + words["limit"].format(ms=1e3 * limit), color="#9a4400", fontsize=9, va="top",
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
    axes.set(xscale="log", xlabel=words["worst_tbt"], ylabel=words["ttft"])
    axes.set_ylim(bottom=0, top=1.12 * firsts.max())
    axes.margins(x=0.1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.spines[["top", "right"]].set_visible(False)
    return titled(fig, words["title_trade"])


def chunk_costs(past: Sequence[int], parts: Mapping[str, Sequence[float]], alone: float) -> Figure:
    """What each step spends its time on while a long prompt goes by, over the prompt tokens already stored.

    parts  "linear", "decodes", "chunk", or a label of your own -> seconds of each step, stacked in this order
    alone  seconds of a step without a chunk
    """
    words = load("plots_chunks")
    fig, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    edges = np.append(past, past[-1] + (past[-1] - past[-2])) / 1e3
    below = np.zeros(len(past))
    styles = ({"color": PALETTE[0]}, {"color": PALETTE[6]}, HATCHED)
    for (name, seconds), style in zip(parts.items(), styles, strict=False):
        top = below + 1e3 * np.asarray(seconds)
        axes.stairs(top, edges, baseline=below, fill=True, label=words.get(name, name), **style)
        below = top
    axes.stairs(below, edges, color="black", linewidth=0.9)
    axes.axhline(1e3 * alone, color=PALETTE[5], linestyle="--", linewidth=1.6, label=words["alone"])
    axes.set(xlabel=words["past"], ylabel=words["ms"], ylim=(0, 1.25 * below.max()))
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9, ncols=2, loc="upper left")
    return titled(fig, words["title_chunk_costs"])


def tiles(
    tokens: Sequence[int], seconds: Sequence[float], tile: int, recorded: Mapping[str, tuple[Sequence, Sequence]]
) -> Figure:
    """Time of the linear layers over the tokens in the step, as a share of the time for 256 tokens.

    recorded  machine -> (tokens, times) as measured; both must have an entry for 256 tokens
    """
    words = load("plots_chunks")
    fig, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    values = np.asarray(seconds) / seconds[list(tokens).index(256)]
    axes.plot(tokens, values, color=PALETTE[6], label=words["simulated"].format(tile=tile))
    for i, (machine, (measured, times)) in enumerate(recorded.items()):
        inside = [(n, t / times[list(measured).index(256)]) for n, t in zip(measured, times, strict=True)]
        inside = np.array([(n, t) for n, t in inside if n <= max(tokens)]).T
        style = {"color": (PALETTE[5], PALETTE[2])[i % 2], "marker": "os"[i % 2], "linestyle": ":"}
        axes.plot(*inside, label=words["measured"].format(machine=machine), **style)
    axes.axvline(256, color="#9a9a9a", linewidth=0.8)
    axes.set(xlabel=words["tokens"], ylabel=words["relative"], xlim=(0, max(tokens)))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(plt.MultipleLocator(128))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return titled(fig, words["title_tiles"])
