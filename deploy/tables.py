"""Closing tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from deploy.comparison import Comparison
from services.statistics import StatisticsSnapshot


def statistics_table(statistics: StatisticsSnapshot) -> Table:
    """Where tokens and time went."""
    table = _table("run")
    table.add_row("tokens", f"{statistics.tokens} in {statistics.seconds:.1f} s")
    table.add_row("throughput", f"{statistics.tokens_per_second:.1f} tokens/s")
    if statistics.drafted:
        table.add_row("committed per round", f"{statistics.committed_per_round:.2f} tokens")
        table.add_row("accepted", f"{statistics.acceptance_rate:.1%} of {statistics.drafted} drafted tokens")
        table.add_row("accepted lengths", _histogram(statistics.accepted_lengths))
    table.add_row("verify batches", f"{statistics.groups}, {statistics.mean_group_size:.1f} rows on average")
    table.add_row("rows in a batch", _histogram(statistics.group_sizes))
    table.add_row("of equal length", f"{statistics.equal_length_share:.1%} of those with two rows or more")
    table.add_row("target time at work", f"{statistics.target_busy_share:.1%}")
    table.add_row("lost to waiting", f"{statistics.waiting_share:.1%}")
    table.add_row("lost to realignment", f"{statistics.realignment_share:.1%}")
    table.add_row("lost to scheduling", f"{statistics.scheduling_share:.1%}")
    return table


def verification_table(
    reference: StatisticsSnapshot,
    policies: Sequence[tuple[str, Comparison, StatisticsSnapshot]],
    generate: Comparison | None,
) -> Table:
    """One row for each way of decoding."""
    table = Table(title="against plain decoding, one sequence at a time", title_justify="left")
    table.add_column("", style="bold", no_wrap=True)
    for heading in ("same text", "same logits", "tokens/s", "a round", "equal length"):
        table.add_column(heading, justify="right")
    table.add_row("reference", "", "", f"{reference.tokens_per_second:.1f}", "", "")
    for name, comparison, statistics in policies:
        table.add_row(
            name,
            _part(comparison.equal_sequences, comparison.sequences),
            _part(comparison.equal_logits, comparison.compared_logits),
            f"{statistics.tokens_per_second:.1f}",
            f"{statistics.committed_per_round:.2f}",
            f"{statistics.equal_length_share:.0%}",
        )
    if generate is not None:
        table.add_row("model.generate", _part(generate.equal_sequences, generate.sequences), "", "", "", "")
    return table


def _part(count: int, total: int) -> str:
    return f"{count} of {total}"


def _table(title: str) -> Table:
    table = Table(title=title, show_header=False, title_justify="left", min_width=48)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    return table


def _histogram(counts: dict[int, int]) -> str:
    """The share of each number: `0: 52%, 1: 31%`; small ones at the end are left out."""
    total = sum(counts.values())
    return ", ".join(f"{number}: {count / total:.0%}" for number, count in counts.items() if count / total >= 0.005)
