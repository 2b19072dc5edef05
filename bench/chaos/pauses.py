"""How long streams paused, from the times of their deliveries."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.chaos.streams import StreamRecord


@dataclass(frozen=True)
class Window:
    """From a fault until everything had recovered."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def pauses(records: Sequence[StreamRecord], window: Window) -> dict[str, Any]:
    """Seconds. A stream's pause is the longest gap between two of its deliveries that touches the window.

    Only streams count that had begun to deliver before the window ended. `whole_cell` is the longest time in which no
    stream got anything.
    """
    running = [one for one in records if one.arrivals and one.arrivals[0] < window.end and one.ended > window.begin]
    longest = [max(_gaps(record, window), default=0.0) for record in running]
    merged = sorted(time for record in records for time in record.arrivals)
    return {
        "window": window.seconds,
        "longest": max(longest, default=None),
        "median": statistics.median(longest) if longest else None,
        "whole_cell": max(_touching(merged, window), default=None),
    }


def _gaps(record: StreamRecord, window: Window) -> Iterator[float]:
    # The end counts as a delivery, so that a stream whose last token comes late has paused.
    return _touching([*record.arrivals, record.ended], window)


def _touching(times: Sequence[float], window: Window) -> Iterator[float]:
    return (after - before for before, after in pairwise(times) if before <= window.end and after >= window.begin)
