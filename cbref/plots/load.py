"""Figures about the scheduler: what it printed, where requests stand, what load does. Words: group "plots_load"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from cbref.metrics import SLO, RequestMetrics
from cbref.plots.serving import HATCHED, PALETTE, STYLES, titled
from cbref.request import Status
from cbref.strings import load

COLOURS = (PALETTE[5], PALETTE[6], PALETTE[2], PALETTE[4])
MARKERS = "os^D"
# Where the boxes of the state machine stand, and how each arrow between two of them bends.
_PLACES = {Status.WAITING: (0.0, 0.0), Status.PREFILL: (1.0, 0.0), Status.DECODE: (2.0, 0.0), Status.FINISHED: (1.0, 1)}
_HALF = (0.3, 0.13)  # of a box


def printed_and_ran(printed: Sequence[int], ran: Sequence[int]) -> Figure:
    """A batch size as a log tells it, and the one that took part in each pass."""
    words = load("plots_load")
    fig, axes = plt.subplots(figsize=(9, 2.8), layout="constrained")
    edges = range(len(printed) + 1)
    axes.stairs(ran, edges, fill=True, **HATCHED, label=words["ran"])
    axes.stairs(printed, edges, baseline=None, color=PALETTE[5], linewidth=2, label=words["printed"])
    axes.set(xlabel=words["pass"], ylabel=words["requests"], ylim=(0, max(ran) + 1.2))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper right")
    return titled(fig, words["title_printed_and_ran"])


def state_machine(counts: Mapping[tuple[Status, Status], int]) -> Figure:
    """The four states of a request, and how often each legal move was made; a move never made is dashed.

    counts  (from, to) -> number of times; every legal move is a key
    """
    words = load("plots_load")
    fig, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    for status, (x, y) in _PLACES.items():
        style = {"boxstyle": "round,pad=0.02", "facecolor": "white", "edgecolor": "black", "linewidth": 1.4}
        box = FancyBboxPatch((x - _HALF[0], y - _HALF[1]), 2 * _HALF[0], 2 * _HALF[1], zorder=2, **style)
        axes.add_patch(box)
        axes.text(x, y, words[status.value], ha="center", va="center", fontsize=12, zorder=3)
    for (source, target), count in counts.items():
        _arrow(axes, source, target, words["times"].format(count=count) if count else words["never"], count > 0)
    axes.set(xlim=(-0.4, 2.4), ylim=(1.25, -0.75))
    axes.set_axis_off()
    return titled(fig, words["title_state_machine"])


def _arrow(axes, source: Status, target: Status, label: str, seen: bool) -> None:
    (x0, y0), (x1, y1) = _PLACES[source], _PLACES[target]
    bend, at = 0.0, ((x0 + x1) / 2, (y0 + y1) / 2)
    if y1 > y0:  # down to the end
        shift = 0.22 * (x0 - x1)
        begin, end = (x0, y0 + _HALF[1] + 0.03), (x1 + shift, y1 - _HALF[1] - 0.03)
        at = ((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2)
    elif x1 > x0:  # on
        begin, end = (x0 + _HALF[0] + 0.03, y0), (x1 - _HALF[0] - 0.03, y1)
        at = (at[0], y0 + 0.13)
    else:  # back to the queue, over the top
        shift = 0.12 * (x0 - x1)
        begin, end = (x0, y0 - _HALF[1] - 0.03), (x1 + 0.12 - shift, y1 - _HALF[1] - 0.03)
        bend = 0.35
        at = (begin[0] + end[0]) / 2, begin[1] - 0.22 * (x0 - x1)
    style = {"arrowstyle": "-|>", "color": PALETTE[6] if seen else "#767676", "linewidth": 1.6, "mutation_scale": 14}
    style |= {"linestyle": "-" if seen else (0, (4, 3)), "connectionstyle": f"arc3,rad={bend}"}
    axes.annotate("", xy=end, xytext=begin, arrowprops=style)
    axes.text(*at, label, ha="center", va="center", fontsize=10, bbox={"facecolor": "white", "edgecolor": "none"})


def under_load(results: Mapping[str, Sequence[tuple[float, Mapping]]], slo: SLO, wanted: float = 0.9) -> Figure:
    """Tail latencies, and the share of requests that meet the SLO, over the rate of arrivals; one curve a policy.

    results  title -> (requests per second, ``Engine.summary`` with this SLO) for each rate
    wanted   share of requests that should meet the SLO
    """
    words = load("plots_load")
    fig, panels = plt.subplots(3, 1, figsize=(6.4, 8), sharex=True, layout="constrained")
    for i, (title, points) in enumerate(results.items()):
        rates = [rate for rate, _ in points]
        values = (
            [s["ttft"]["p99"] for _, s in points],
            [s["tbt"]["p99"] for _, s in points],
            [s["slo"]["attainment"] for _, s in points],
        )
        style = {"color": COLOURS[i % 4], "linestyle": STYLES[i % 4], "marker": MARKERS[i % 4]}
        for axes, y in zip(panels, values, strict=True):
            axes.plot(rates, y, label=words.get(f"run_{title}", title), **style)
    limits = {"ttft_p99": slo.ttft, "tbt_p99": slo.tbt, "attainment": wanted}
    for axes, (name, limit) in zip(panels, limits.items(), strict=True):
        axes.set_ylabel(words[name])
        axes.spines[["top", "right"]].set_visible(False)
        axes.axhline(limit, color="#767676", linewidth=1)
        axes.text(1.0, limit, words["limit"], transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    for axes in panels[:2]:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panels[2].yaxis.set_major_formatter(PercentFormatter(1))
    panels[2].set_xlabel(words["rate"])
    handles, labels = panels[2].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return titled(fig, words["title_under_load"])


def goodput_curves(results: Mapping[str, Sequence[tuple[float, Mapping]]], slo: SLO) -> Figure:
    """TBT over throughput, and goodput over the rate of arrivals, both as the load grows; one curve a policy.

    results  title -> (requests per second, ``Engine.summary`` with this SLO) for each rate, as for ``under_load``
    Goodput is the rate times the share within the SLO. The summary's goodput divides by the whole run, and in a short
    run the time after the last arrival counts for much: it would lie far below the ideal even if all met the SLO.
    """
    words = load("plots_load")
    fig, (latency, good) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for i, (title, points) in enumerate(results.items()):
        rates, summaries = zip(*points, strict=True)
        style = {"color": COLOURS[i % 4], "linestyle": STYLES[i % 4], "marker": MARKERS[i % 4]}
        label = words.get(f"run_{title}", title)
        latency.plot([s["tokens_per_second"] for s in summaries], [s["tbt"]["p99"] for s in summaries], **style)
        good.plot(rates, [r * s["slo"]["attainment"] for r, s in points], label=label, **style)
    latency.set(xlabel=words["tokens_per_second"], ylabel=words["tbt_p99"], yscale="log", xlim=(0, None))
    latency.axhline(slo.tbt, color="#767676", linewidth=1)
    latency.text(1.0, slo.tbt, words["limit"], transform=latency.get_yaxis_transform(), va="center", fontsize=9)
    latency.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    latency.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    highest = max(rate for points in results.values() for rate, _ in points)
    good.plot([0, highest], [0, highest], ":", color="#767676", linewidth=1.2, label=words["all_good"])
    good.set(xlabel=words["rate"], ylabel=words["goodput"], xlim=(0, None), ylim=(0, None))
    good.xaxis.set_major_locator(MaxNLocator(5))
    good.yaxis.set_major_locator(MaxNLocator(5))
    for axes in (latency, good):
        axes.spines[["top", "right"]].set_visible(False)
    fig.legend(*good.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return titled(fig, words["title_goodput_curves"])


def waits_by_size(runs: Mapping[str, tuple[Sequence[int], Sequence[RequestMetrics]]]) -> Figure:
    """How long each request queued, over how much it wants; one panel a run: ``title -> (sizes, metrics)``."""
    words = load("plots_load")
    fig, panels = plt.subplots(
        1, len(runs), figsize=(9, 3.2), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for i, (axes, (title, (sizes, metrics))) in enumerate(zip(panels[0], runs.items(), strict=True)):
        style = {"s": 10, "color": COLOURS[i % 4], "marker": MARKERS[i % 4], "alpha": 0.6}
        axes.scatter(sizes, [m.queueing_delay for m in metrics], **style)
        axes.set_title(words.get(f"run_{title}", title), loc="left", fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set(xlim=(0, None), ylim=(0, None), ylabel=words["wait"])
    fig.supxlabel(words["size"], fontsize=10)
    return titled(fig, words["title_waits_by_size"])
