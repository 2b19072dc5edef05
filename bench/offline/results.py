"""Measurements of `spool bench offline`, their summary and its table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from bench.offline.grid import GridPoint


@dataclass(frozen=True, slots=True)
class Measurement:
    """One cell, measured once.

    `different` has the numbers of the prompts whose output differs from that of batch-1 plain decoding by the same
    software; `exact_match` is the share of the other prompts. `statistics` are the scheduler's, empty for peers.
    """

    point: GridPoint
    repeat: int
    tokens: int
    seconds: float
    exact_match: float
    different: list[int]
    statistics: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"point": self.point.to_json(), "tokens_per_second": self.tokens_per_second}


def summarise(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One summary per cell, in the order in which the cells first appear.

    `ratio_to_plain` compares with plain decoding of the same repeat, so that whatever slows the machine for a while
    slows both. `statistics` are those of the last repeat.
    """
    cells: dict[GridPoint, dict[int, Measurement]] = {}
    for one in measurements:
        cells.setdefault(one.point, {})[one.repeat] = one
    summaries = []
    for point, repeats in cells.items():
        plain = cells.get(point.baseline, {})
        ratios = [
            one.tokens_per_second / plain[repeat].tokens_per_second
            for repeat, one in repeats.items()
            if repeat in plain
        ]
        last = repeats[max(repeats)]
        summaries.append(
            {
                "point": point.to_json(),
                "repeats": len(repeats),
                "tokens_per_second": _spread([one.tokens_per_second for one in repeats.values()]),
                "ratio_to_plain": _spread(ratios) if ratios else None,
                "exact_match": min(one.exact_match for one in repeats.values()),
                "statistics": last.statistics,
            }
        )
    return summaries


def cells_table(cells: Sequence[dict[str, Any]]) -> Table:
    """One row per cell."""
    table = Table(title="median of the repeats (minimum to maximum)", title_justify="left")
    for heading in ("", "batch", "draft"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tokens/s", "x plain", "same output", "tokens a round", "accepted", "target busy"):
        table.add_column(heading, justify="right")
    for cell in cells:
        point, counts = cell["point"], cell["statistics"]
        drafted = bool(counts and counts["drafted"])
        table.add_row(
            point["system"],
            str(point["batch_size"]),
            "" if point["draft"] is None else f"{point['draft']}, {point['draft_length']}",
            _shown(cell["tokens_per_second"], 1),
            _shown(cell["ratio_to_plain"], 2),
            f"{cell['exact_match']:.1%}",
            f"{counts['committed_per_round']:.2f}" if drafted else "",
            f"{counts['acceptance_rate']:.0%}" if drafted else "",
            f"{counts['target_busy_share']:.0%}" if counts else "",
        )
    return table


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "minimum": min(values), "maximum": max(values)}


def _shown(spread: dict[str, float] | None, digits: int) -> str:
    if spread is None:
        return ""
    return f"{spread['median']:.{digits}f} ({spread['minimum']:.{digits}f}-{spread['maximum']:.{digits}f})"
