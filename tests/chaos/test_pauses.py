"""What counts as a pause of a stream."""

from __future__ import annotations

from bench.chaos.pauses import Window, pauses
from bench.chaos.streams import Case, Protocol, StreamRecord


def stream(began: float, *arrivals: float, ended: float) -> StreamRecord:
    return StreamRecord(Case("a", 0, 0.0, 8), Protocol.HTTP, began, ended, list(arrivals), "text", len(arrivals))


def test_pauses_are_gaps_that_touch_the_window() -> None:
    records = [
        stream(0, 1, 2, 9, 10, ended=10),  # 7 s from before the fault into the window
        stream(0, 1, 6, 7, 8, ended=8.5),  # 5 s into it, then 1 s
        stream(0, 0.5, 3, ended=4.5),  # over before the fault
        stream(5.5, 8.5, 30, ended=30),  # begun after the fault
    ]
    # No stream got anything between 3 and 6.
    assert pauses(records, Window(5, 9)) == {"window": 4, "longest": 7, "median": 6, "whole_cell": 3}


def test_a_stream_whose_end_is_late_has_paused() -> None:
    assert pauses([stream(0, 1, 2, ended=8)], Window(3, 4))["longest"] == 6


def test_without_streams_there_are_no_pauses() -> None:
    assert pauses([], Window(0, 1)) == {"window": 1, "longest": None, "median": None, "whole_cell": None}
