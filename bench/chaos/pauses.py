"""How long streams stood still, from the times at which something of them came."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.chaos.streams import StreamRecord


@dataclass(frozen=True)
class Window:
    """From the moment of a fault until all was in use again."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def touches(self, begin: float, end: float) -> bool:
        return begin <= self.end and end >= self.begin


def pauses(records: Sequence[StreamRecord], window: Window) -> dict[str, Any]:
    """Seconds. A stream's pause is the longest gap between two of its deliveries that touches the window.

    `running` are the streams that had begun to deliver when the window began and had not ended. `first_delivery` is
    the longest wait of a request for its first one, `whole_cell` the longest time in which no stream got anything.
    """
    running = [record for record in records if record.arrivals and record.arrivals[0] < window.begin < record.ended]
    longest = [max(_gaps(record, window), default=0.0) for record in running]
    waits = [
        record.arrivals[0] - record.began
        for record in records
        if record.arrivals and window.touches(record.began, record.arrivals[0])
    ]
    merged = sorted(time for record in records for time in record.arrivals)
    return {
        "window": window.seconds,
        "running": len(running),
        "longest": max(longest, default=None),
        "median": statistics.median(longest) if longest else None,
        "first_delivery": max(waits, default=None),
        "whole_cell": max(_touching(merged, window), default=None),
    }


def _gaps(record: StreamRecord, window: Window) -> Iterator[float]:
    # A stream whose last token is lost would end late: its end is a delivery as well.
    return _touching([*record.arrivals, record.ended], window)


def _touching(times: Sequence[float], window: Window) -> Iterator[float]:
    return (after - before for before, after in pairwise(times) if window.touches(before, after))
