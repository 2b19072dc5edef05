"""Figures of results, as small SVG files that are the same for the same results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

MAX_BYTES = 60_000
_SIZE = (7.0, 3.6)
_ROW_INCHES = 0.18
_SHARES = {
    "target_busy_share": "at work",
    "realignment_share": "realigning",
    "scheduling_share": "scheduling",
    "waiting_share": "waiting",
}
# Text stays text, ids do not depend on chance.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "spool",
    "font.size": 8,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


def draw(path: Path, fill: Callable[[Figure], None]) -> Path:
    """Writes one figure. Raises ValueError if it is larger than `MAX_BYTES`."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        fill(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes, must have at most {MAX_BYTES}")
    return path


def way(point: dict[str, Any]) -> str:
    """A cell's name without its batch size."""
    parts = [point["system"]]
    if point["draft"] is not None:
        parts.append(f"{point['draft']} x {point['draft_length']}")
    if point["exact"] is False:
        parts.append("not exact")
    return ", ".join(parts)


def over_all(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells that took the prompts of all categories."""
    return [cell for cell in cells if cell["point"]["category"] is None]


def ratio_over_batch_size(cells: Sequence[dict[str, Any]], figure: Figure) -> None:
    """Throughput as a multiple of plain decoding, with the least and the most of the repeats."""
    axes = figure.subplots()
    lines: dict[str, list[dict[str, Any]]] = {}
    for cell in over_all(cells):
        # Plain decoding is the line at 1.
        if cell["ratio_to_plain"] is not None and cell["point"]["system"] != "plain":
            lines.setdefault(way(cell["point"]), []).append(cell)
    for name, found in lines.items():
        found = sorted(found, key=lambda cell: cell["point"]["batch_size"])
        ratios = [cell["ratio_to_plain"] for cell in found]
        middle = [ratio["median"] for ratio in ratios]
        below = [ratio["median"] - ratio["least"] for ratio in ratios]
        above = [ratio["most"] - ratio["median"] for ratio in ratios]
        sizes = [cell["point"]["batch_size"] for cell in found]
        axes.errorbar(sizes, middle, yerr=[below, above], marker="o", markersize=3, capsize=2, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    ticks = sorted({cell["point"]["batch_size"] for found in lines.values() for cell in found})
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.set_xlabel("batch size")
    axes.set_ylabel("throughput / plain decoding")
    axes.set_ylim(bottom=0)
    _legend(axes)


def time_breakdown(cells: Sequence[dict[str, Any]], figure: Figure) -> None:
    """Where the target's time went, for each cell of Spool's."""
    axes = figure.subplots()
    figure.set_figheight(max(_SIZE[1], _ROW_INCHES * len(over_all(cells))))
    shown = [cell for cell in over_all(cells) if cell["statistics"]]
    names = [f"{way(cell['point'])}, batch {cell['point']['batch_size']}" for cell in shown]
    left = [0.0] * len(shown)
    for share, label in _SHARES.items():
        values = [cell["statistics"][share] for cell in shown]
        axes.barh(names, values, left=left, label=label)
        left = [before + value for before, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the target's time")
    axes.legend(fontsize=6, ncols=len(_SHARES), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def accepted_lengths(cells: Sequence[dict[str, Any]], figure: Figure) -> None:
    """Of the rounds with a draft, the share that accepted each number of tokens; at the largest batch size."""
    axes = figure.subplots()
    drafted = [cell for cell in over_all(cells) if cell["statistics"].get("drafted")]
    most = max(cell["point"]["batch_size"] for cell in drafted)
    shown = [cell for cell in drafted if cell["point"]["batch_size"] == most]
    width = 0.8 / len(shown)
    for place, cell in enumerate(shown):
        counts = {int(length): count for length, count in cell["statistics"]["accepted_lengths"].items()}
        total = sum(counts.values())
        axes.bar(
            [length + (place - (len(shown) - 1) / 2) * width for length in counts],
            [count / total for count in counts.values()],
            width=width,
            label=way(cell["point"]),
        )
    axes.set_xlabel(f"accepted draft tokens, batch {most}")
    axes.set_ylabel("share of rounds")
    _legend(axes)


def latency_over_load(loads: Sequence[dict[str, Any]], figure: Figure) -> None:
    """Percentiles of both latencies, by the rate of arrivals."""
    ordered = sorted(loads, key=lambda load: load["rate"])
    left, right = figure.subplots(1, 2)
    for axes, name, factor, label in (
        (left, "first_token_seconds", 1.0, "seconds to the first token"),
        (right, "seconds_per_token", 1000.0, "ms a token after it"),
    ):
        known = [load for load in ordered if load[name]]
        for percent in known[0][name] if known else ():
            values = [load[name][percent] * factor for load in known]
            axes.plot([load["rate"] for load in known], values, marker="o", markersize=3, label=percent)
        axes.set_xlabel("requests/s")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        _legend(axes)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=6, framealpha=0.6)
