"""Figures of the two phases: the roofline, arithmetic intensity, bytes, and times by tokens in the step.

Words come from ``cbref.strings``, group "plots_roofline"; labels of curves come from the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from cbref.hardware import Hardware
from cbref.plots.serving import PALETTE, titled
from cbref.strings import load

COLOURS = (PALETTE[6], PALETTE[5], PALETTE[2], PALETTE[4], PALETTE[1], PALETTE[0])
STYLES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "os^Dv"
GREY = "#777777"


def roofline(gpus: Sequence[Hardware], marks: Mapping[str, float] | None = None) -> Figure:
    """What each GPU can do at most, over the arithmetic intensity of the work; a dot at each ridge point.

    marks   label -> intensity in FLOP per byte: upright lines, labelled at their feet
    """
    words = load("plots_roofline")
    fig, axes = plt.subplots(figsize=(8, 4.9), layout="constrained")
    left, right = 0.5, 8192.0
    x = np.geomspace(left, right, 400)
    for i, gpu in enumerate(gpus):
        label = words["gpu"].format(name=gpu.name, ridge=gpu.ridge)
        style = {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i % len(STYLES)], "linewidth": 2}
        axes.plot(x, np.minimum(gpu.flops, gpu.bandwidth * x) / 1e12, label=label, **style)
        axes.plot(gpu.ridge, gpu.flops / 1e12, MARKERS[i % len(MARKERS)], color=style["color"], markersize=7)
    bottom = min(gpu.bandwidth for gpu in gpus) * left / 1e12 / 8
    for label, intensity in (marks or {}).items():
        axes.axvline(intensity, color=GREY, linestyle=":", linewidth=1)
        frame = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.5}
        axes.text(
            intensity / 1.06, bottom * 1.15, label, rotation=90, ha="right", va="bottom", fontsize=8, color="#333333",
            bbox=frame,
        )  # fmt: skip
    axes.set(xlabel=words["intensity"], ylabel=words["rate"], xscale="log", yscale="log")
    axes.set_xlim(left, right)
    axes.set_ylim(bottom=bottom)
    _plain_numbers(axes.xaxis, [1, 4, 16, 64, 256, 1024, 4096])
    _plain_numbers(axes.yaxis, [0.1, 1, 10, 100, 1000])
    _open(axes)
    columns = min(len(gpus), 4)
    fig.legend(
        title=words["ridge"], frameon=False, fontsize=9, title_fontsize=9, loc="outside lower center", ncols=columns
    )
    return titled(fig, words["title_roofline"])


def intensities(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], gpus: Sequence[Hardware] = ()) -> Figure:
    """Arithmetic intensity over the number of requests, one curve a part of the model; level lines for ridge points."""
    words = load("plots_roofline")
    fig, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    _curves(axes, curves)
    right = max(x[-1] for x, _ in curves.values())
    for gpu in gpus:
        axes.axhline(gpu.ridge, color=GREY, linestyle=":", linewidth=1)
        text = words["ridge_of"].format(name=gpu.name)
        axes.text(1, gpu.ridge * 1.06, text, ha="left", va="bottom", fontsize=8, color="#333333")
    axes.set(xlabel=words["requests"], ylabel=words["intensity"])
    _powers_of_two(axes, right)
    axes.set_yscale("log", base=2)
    _plain_numbers(axes.yaxis, [1, 4, 8, 16, 64, 256, 1024])
    fig.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return titled(fig, words["title_intensities"])


def relative_times(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], xlabel: str = "tokens", *, thin: int = 0
) -> Figure:
    """Times over tokens (or over rows), each curve relative to its own first point; both axes logarithmic.

    xlabel  "tokens", "rows", or a text of your own;   thin  so many of the last curves are drawn faint, as a background
    """
    words = load("plots_roofline")
    fig, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    relative = {label: (x, np.asarray(y) / y[0]) for label, (x, y) in curves.items()}
    _curves(axes, relative, thin)
    right = max(x[-1] for x, _ in curves.values())
    top = max(y.max() for _, y in relative.values())
    ideal = np.geomspace(1, right, 50)
    axes.plot(ideal, ideal, color=GREY, linestyle=":", linewidth=1, label=words["proportional"])
    axes.set(xlabel=words.get(xlabel, xlabel), ylabel=words["relative"], yscale="log")
    _powers_of_two(axes, right)
    axes.set_ylim(0.7, top * 1.6)
    _plain_numbers(axes.yaxis, [1, 2, 4, 8, 16, 32, 64, 128])
    fig.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return titled(fig, words.get(f"title_relative_times_{xlabel}", words["title_relative_times"]))


def bytes_read(steps: Mapping[str, tuple[float, float, int]]) -> Figure:
    """What decode steps read: weights and cache, of a whole step and divided by its tokens.

    steps   label -> (bytes of weights, bytes of keys and values, tokens made)
    """
    words = load("plots_roofline")
    fig, panels = plt.subplots(1, 2, figsize=(9, 1.2 + 0.5 * len(steps)), sharey=True, layout="constrained")
    names = list(steps)
    weights, cache, tokens = (np.array(column, float) for column in zip(*steps.values(), strict=True))
    for axes, divisor, label in ((panels[0], 1e9, "read"), (panels[1], 1e9 * tokens, "share")):
        axes.barh(names, weights / divisor, color=PALETTE[0], edgecolor="black", linewidth=0.6, label=words["weights"])
        axes.barh(
            names, cache / divisor, left=weights / divisor, color=PALETTE[1], edgecolor="black", linewidth=0.6,
            hatch="///", label=words["cache"],
        )  # fmt: skip
        axes.set_xlabel(words[label])
        _open(axes)
    panels[0].invert_yaxis()
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return titled(fig, words["title_bytes_read"])


def prompt_and_decode(machines: Mapping[str, Mapping]) -> Figure:
    """Times of whole prompts by their length, and of decode steps by the batch size, side by side; milliseconds.

    machines   name -> {"prompt": {"prompt_size": …, "ms": …}, "decode": {"batch_size": …, "ms": …}}, as recorded
    """
    words = load("plots_roofline")
    fig, (prompt, decode) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    _curves(prompt, {name: (m["prompt"]["prompt_size"], m["prompt"]["ms"]) for name, m in machines.items()})
    _curves(decode, {name: (m["decode"]["batch_size"], m["decode"]["ms"]) for name, m in machines.items()})
    for axes, label in ((prompt, "prompt"), (decode, "batch")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(words[label])
        axes.set_ylim(bottom=0)
        ticks = sorted({x for line in axes.get_lines() for x in line.get_xdata()})
        axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    prompt.set_ylabel(words["ms"])
    fig.legend(*prompt.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return titled(fig, words["title_prompt_and_decode"])


# ---- parts of the above


def _curves(axes: Axes, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], thin: int = 0) -> None:
    for i, (label, (x, y)) in enumerate(curves.items()):
        faint = i >= len(curves) - thin
        axes.plot(
            x, y, color=COLOURS[i % len(COLOURS)], linestyle=STYLES[i % len(STYLES)], marker=MARKERS[i % len(MARKERS)],
            markersize=4 if faint else 6, linewidth=1.2 if faint else 2.2, label=label,
        )  # fmt: skip
    _open(axes)


def _open(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _powers_of_two(axes: Axes, right: float) -> None:
    axes.set_xscale("log", base=2)
    last = int(np.log2(right))
    axes.set_xticks([2.0**i for i in range(0, last + 1, 1 if last < 8 else 2)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _plain_numbers(axis, ticks: Sequence[float]) -> None:
    """These ticks, as far as they are in view, as numbers and not as powers."""
    low, high = axis.get_view_interval()
    axis.set_ticks([tick for tick in ticks if low <= tick <= high])
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
