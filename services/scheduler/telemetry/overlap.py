"""How long intervals of time overlap. An interval is a pair (begin, end), in seconds on one clock."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def overlap_seconds(intervals: Iterable[Interval], others: Iterable[Interval]) -> float:
    """For how long one of the `others` lasts during each of the `intervals`, added up.

    Time that several of the `intervals` share counts once for each of them. The `others` must be disjoint (`union`).
    """
    busy = sorted(others)
    seconds = 0.0
    first = 0
    for begin, end in sorted(intervals):
        while first < len(busy) and busy[first][1] <= begin:
            first += 1
        for other_begin, other_end in busy[first:]:
            if other_begin >= end:
                break
            seconds += min(end, other_end) - max(begin, other_begin)
    return seconds


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same time, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged
