"""Figures of memory: what is set aside and what is used, who holds which block. Words: group "plots_memory"."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter

from cbref.kv_cache import BlockPool
from cbref.plots.serving import HATCHED, PALETTE, STYLES, titled
from cbref.strings import load

COLUMNS = 8  # blocks in a row of a drawn pool
LINES = (PALETTE[5], PALETTE[6], PALETTE[2], PALETTE[4])


def live_share(shares: Mapping[str, Mapping[str, float]]) -> Figure:
    """How much of the memory that is set aside holds a token: one panel a trace, one bar a scheme.

    shares  the trace's name -> the scheme's name ("max", "pow2", "paged", or a label of your own) -> share of one
    """
    words = load("plots_memory")
    rows = max(len(schemes) for schemes in shares.values())
    fig, panels = plt.subplots(
        len(shares), 1, figsize=(6, 0.7 + len(shares) * (0.5 + 0.38 * rows)), sharex=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, (trace, schemes) in zip(panels[:, 0], shares.items(), strict=True):
        for row, share in enumerate(schemes.values()):
            axes.barh(row, 100, height=0.7, **HATCHED)
            axes.barh(row, 100 * share, height=0.7, color=PALETTE[0], edgecolor="black", linewidth=0.6)
            left = share > 0.5
            axes.text(
                100 * share + (-1 if left else 1), row, f"{100 * share:.1f} %",
                ha="right" if left else "left", va="center", fontsize=9,
                bbox=None if left else {"facecolor": "white", "edgecolor": "none", "pad": 1},
            )  # fmt: skip
        axes.set_yticks(range(len(schemes)), [words.get(f"scheme_{name}", name) for name in schemes])
        axes.set_title(words.get(f"trace_{trace}", trace), loc="left", fontsize=10)
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.tick_params(left=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1, 0].set_xlabel(words["share_of_memory"])
    handles = [
        Patch(label=words["live"], facecolor=PALETTE[0], edgecolor="black", linewidth=0.6),
        Patch(label=words["wasted"], **{**HATCHED, "linewidth": 0.5}),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return titled(fig, words["title_live_share"])


def memory_strips(strips: Mapping[str, Sequence[tuple[int, int, str]]], size: int) -> Figure:
    """Memory as a strip of ``size`` places, one strip a title: who holds ``start:stop``; what nobody holds is hatched.

    strips  title -> (start, stop, name of the holder); a holder has one colour, however many pieces it has
    """
    words = load("plots_memory")
    fig, panels = plt.subplots(
        len(strips), 1, figsize=(6.5, 0.6 + 0.95 * len(strips)), sharex=True, squeeze=False, layout="constrained"
    )
    names = dict.fromkeys(name for pieces in strips.values() for *_, name in pieces)
    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}
    for axes, (title, pieces) in zip(panels[:, 0], strips.items(), strict=True):
        axes.barh(0, size, height=0.8, **HATCHED)
        for start, stop, name in pieces:
            axes.barh(0, stop - start, left=start, height=0.8, color=colours[name], edgecolor="black", linewidth=0.4)
            if stop - start > 0.012 * size * len(name):
                axes.text((start + stop) / 2, 0, name, ha="center", va="center", fontsize=8)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_yticks([])
        axes.set_xlim(0, size)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1, 0].set_xlabel(words["place"])
    panels[-1, 0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return titled(fig, words["title_memory_strips"])


def block_size_trade(sizes: Sequence[int], wasted: Sequence[float], entries: Sequence[float]) -> Figure:
    """What a larger block costs and saves: the share of memory without a token, and the entries of a block table."""
    words = load("plots_memory")
    fig, panels = plt.subplots(1, 2, figsize=(6.5, 3), layout="constrained")
    lines = ((100 * w for w in wasted), "wasted_share", LINES[0]), (entries, "table_entries", LINES[1])
    for axes, (values, name, colour) in zip(panels, lines, strict=True):
        axes.plot(sizes, [value or np.nan for value in values], "o-", color=colour)  # no zeros on this axis
        axes.axvline(16, color="#777777", linestyle=":", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=words["block_size"], ylabel=words[name])
        axes.set_xticks(sizes[::2], sizes[::2])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.spines[["top", "right"]].set_visible(False)
    return titled(fig, words["title_block_size_trade"])


def pool_map(pool: BlockPool, stored: Mapping[str, int], idle: Collection[int] = ()) -> Figure:
    """A pool's blocks with the letters of their holders, and below it the table of each request.

    stored  request id -> tokens that it has stored; the filled part of its blocks is drawn darker
    idle    blocks that nobody holds and whose content can be found again
    """
    words = load("plots_memory")
    grid, last = -(-pool.num_blocks // COLUMNS), list(stored)
    tallest = max([len(pool.table(r)) for r in stored], default=0)
    columns = max(COLUMNS, tallest)
    fig, axes = plt.subplots(figsize=(6.5, 0.6 * grid + 0.48 * len(stored) + 0.7), layout="constrained")
    colours = {request: PALETTE[i % len(PALETTE)] for i, request in enumerate(last)}
    fill = {b: min(pool.block_size, n - i * pool.block_size) for r, n in stored.items()
            for i, b in enumerate(pool.table(r))}  # fmt: skip
    for block in range(pool.num_blocks):
        holders = pool.holders(block)
        x, y = block % COLUMNS, block // COLUMNS
        _cell(axes, x, y, 0.72, fill.get(block, 0) / pool.block_size, [colours[h] for h in holders], block in idle)
        axes.text(x + 0.05, y + 0.1, str(block), fontsize=7, va="center", color="#333333")
        axes.text(x + 0.47, y + 0.42, "".join(holders), fontsize=11, ha="center", va="center", weight="bold")
    for row, request in enumerate(stored):
        y = grid + 0.25 + 0.62 * row
        axes.text(-0.1, y + 0.22, words["table_of"].format(request=request), ha="right", va="center", fontsize=9)
        for i, block in enumerate(pool.table(request)):
            owners = [colours[h] for h in pool.holders(block)]
            _cell(axes, i, y, 0.44, 1.0, owners, False)
            axes.text(i + 0.47, y + 0.22, str(block), fontsize=9, ha="center", va="center")
    axes.set(xlim=(-1.5 if stored else -0.05, columns), ylim=(grid + 0.25 + 0.62 * len(stored), -0.05))
    axes.set_axis_off()
    handles = [Patch(label=words["cell_free"], facecolor="white", edgecolor="#9a9a9a")]
    if stored:
        handles.append(Patch(label=words["cell_used"], facecolor=PALETTE[0], edgecolor="black"))
    if any(pool.num_holders(b) > 1 for b in range(pool.num_blocks)):
        handles.append(Patch(label=words["cell_shared"], facecolor="white", edgecolor="black", linewidth=2.4))
    if idle:
        handles.append(Patch(label=words["cell_idle"], facecolor="#f4f4f4", edgecolor="#555555", linestyle="--"))
    fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return titled(fig, words["title_pool_map" if stored else "title_pool_map_blocks"])


def _cell(axes: Axes, x: float, y: float, height: float, full: float, colours: Sequence[str], idle: bool) -> None:
    """One block: its holders' colours side by side, pale where it is empty; a thick frame if it has several."""
    width = 0.94 / max(1, len(colours))
    for i, colour in enumerate(colours):
        axes.add_patch(Rectangle((x + i * width, y), width, height, facecolor=colour, alpha=0.3, linewidth=0))
    if colours and full > 0:  # tokens fill a block from the left
        done = 0.94 * full
        for i, colour in enumerate(colours):
            part = min(width, done - i * width)
            if part > 0:
                axes.add_patch(Rectangle((x + i * width, y), part, height, facecolor=colour, linewidth=0))
    style = {"edgecolor": "black" if colours else "#9a9a9a", "linewidth": 2.4 if len(colours) > 1 else 0.8}
    if idle:
        style = {"edgecolor": "#555555", "linestyle": "--", "linewidth": 1.4}
        axes.add_patch(Rectangle((x, y), 0.94, height, facecolor="#f4f4f4", linewidth=0))
    axes.add_patch(Rectangle((x, y), 0.94, height, fill=False, **style))


def capacity(runs: Mapping[str, Sequence[tuple[int, float, float]]]) -> Figure:
    """Throughput and batch over the room in the cache: a policy -> (tokens of room, tokens per second, batch)."""
    words, policies = load("plots_memory"), load("plots")
    fig, panels = plt.subplots(1, 2, figsize=(6.5, 3.1), layout="constrained")
    for i, (policy, points) in enumerate(runs.items()):
        room, speed, batch = zip(*points, strict=True)
        style = {"color": LINES[i % 4], "linestyle": STYLES[i % 4], "marker": "os^D"[i % 4]}
        for axes, values in zip(panels, (speed, batch), strict=True):
            axes.plot([r / 1000 for r in room], values, label=policies.get(f"run_{policy}", policy), **style)
    for axes, name in zip(panels, ("tokens_per_second", "mean_batch"), strict=True):
        axes.set(xlabel=words["kv_capacity"], ylabel=words[name], ylim=(0, None), xlim=(0, None))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=9)
    return titled(fig, words["title_capacity"])
