"""Closing tables of a benchmark, from the cells of its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table


def cells_table(cells: Sequence[dict[str, Any]]) -> Table:
    """One row a cell."""
    table = Table(title="median of the repeats (least to most)", title_justify="left")
    for heading in ("", "batch", "draft", "exact"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "tokens/s",
        "x plain",
        "same output",
        "a round",
        "group",
        "at work",
        "waiting",
        "realigning",
        "scheduling",
        "draft hidden",
    ):
        table.add_column(heading, justify="right")
    for cell in cells:
        table.add_row(*cell_columns(cell))
    return table


def cell_columns(cell: dict[str, Any]) -> list[str]:
    """The texts of one row of `cells_table`."""
    point, counts = cell["point"], cell["statistics"]
    system = point["system"] if point["category"] is None else f"{point['system']}: {point['category']}"
    draft = "" if point["draft"] is None else f"{point['draft']}, {point['draft_length']}"
    columns = [system, str(point["batch_size"]), draft, {True: "yes", False: "no", None: ""}[point["exact"]]]
    columns.append(spread(cell["tokens_per_second"], 1))
    columns.append(spread(cell["ratio_to_plain"], 2))
    columns.append(f"{cell['exact_match']:.1%}")
    if not counts:
        return columns + [""] * 7
    columns.append(f"{counts['committed_per_round']:.2f}" if counts["drafted"] else "")
    columns.append(f"{counts['mean_group_size']:.1f}")
    shares = ("target_busy_share", "waiting_share", "realignment_share", "scheduling_share")
    columns += [f"{counts[name]:.0%}" for name in shares]
    columns.append("" if cell["hidden_draft_share"] is None else f"{cell['hidden_draft_share']:.0%}")
    return columns


def category_table(cells: Sequence[dict[str, Any]]) -> Table:
    """One row for each category of each cell that drafts."""
    table = Table(title="by category", title_justify="left")
    for heading in ("", "batch", "draft", "category"):
        table.add_column(heading, no_wrap=True)
    for heading in ("a round", "agreement at each place", "tokens/s of a sequence"):
        table.add_column(heading, justify="right")
    for cell in cells:
        point = cell["point"]
        if point["draft"] is None or point["category"] is not None:
            continue
        for name, category in cell["categories"].items():
            system, batch_size, draft = cell_columns(cell)[:3]
            table.add_row(system, batch_size, draft, name, *category_columns(category))
    return table


def category_columns(category: dict[str, Any]) -> list[str]:
    """Tokens a round, agreement by place, speed of a sequence; empty where there is no figure."""
    speed = category["sequence_tokens_per_second"]
    return [
        number(category["committed_per_round"], 2),
        " ".join(f"{share:.2f}" for share in agreement(category)),
        number(speed, 1),
    ]


def agreement(category: dict[str, Any]) -> list[float]:
    """Of the rounds with a draft token at each place, the share whose draft survived up to and with it."""
    pairs = zip(category["accepted_at"], category["drafted_at"], strict=True)
    return [accepted / drafted for accepted, drafted in pairs if drafted]


def spread(values: dict[str, float] | None, digits: int) -> str:
    """`12.3 (11.9-12.8)`."""
    if values is None:
        return ""
    return f"{values['median']:.{digits}f} ({values['least']:.{digits}f}-{values['most']:.{digits}f})"


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
