"""The part of the drafts' time in which a target computes, against counting second by second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.messages import Role
from services.scheduler.telemetry import hidden_drafting
from services.scheduler.telemetry.hidden_drafting import HiddenDrafting
from services.scheduler.telemetry.overlap import Interval

WORKERS = {"d0": Role.DRAFT, "d1": Role.DRAFT, "t0": Role.TARGET, "t1": Role.TARGET}


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, int, int, int, int]]:
    """(worker, sent, begin, end, replied) in whole seconds."""
    found = []
    for worker in WORKERS:
        for _ in range(draw(st.integers(0, 6))):
            times = sorted(draw(st.lists(st.integers(0, 40), min_size=4, max_size=4)))
            found.append((worker, *times))
    return found


@given(steps())
def test_every_second_of_a_draft_is_hidden_once(steps: list[tuple[str, int, int, int, int]]) -> None:
    hidden = HiddenDrafting()
    events: list[tuple[int, int, int]] = []
    for number, (_, sent, _, _, replied) in enumerate(steps):
        events += [(sent, 0, number), (replied, 1, number)]
    for time, replies, number in sorted(events):
        worker, _, begin, end, _ = steps[number]
        if replies:
            hidden.step_replied(WORKERS[worker], worker, number, (begin, end))
        else:
            hidden.step_sent(worker, number, time)
    verified = {second for worker, _, begin, end, _ in steps if worker.startswith("t") for second in range(begin, end)}
    drafted = [second for worker, _, begin, end, _ in steps if worker.startswith("d") for second in range(begin, end)]
    assert hidden.seconds == sum(second in verified for second in drafted)


def test_little_is_remembered() -> None:
    hidden = HiddenDrafting()
    for number in range(1000):
        for worker in ("d0", "t0"):
            hidden.step_sent(worker, number, 2 * number)
        for worker, role in (("d0", Role.DRAFT), ("t0", Role.TARGET)):
            hidden.step_replied(role, worker, number, (2 * number, 2 * number + 1))
    assert hidden.seconds == 1000
    assert not hidden._drafting
    assert not hidden._verifying


def test_steps_of_a_lost_worker_hold_nothing_back() -> None:
    hidden = HiddenDrafting()
    hidden.step_sent("t0", 1, 0)
    hidden.step_sent("d0", 2, 0)
    hidden.step_replied(Role.DRAFT, "d0", 2, (0, 5))
    assert hidden._drafting == [(0, 5)]
    hidden.worker_lost("t0")
    assert not hidden._drafting
    hidden.step_replied(Role.TARGET, "t0", 1, (0, 5))
    assert hidden.seconds == 0


def test_a_reply_looks_only_at_what_is_about_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is remembered while a worker hangs."""
    looked_at: list[int] = []
    after = hidden_drafting._after

    def counted(intervals: list[Interval], time: float) -> list[Interval]:
        looked_at.append(len(found := after(intervals, time)))
        return found

    monkeypatch.setattr(hidden_drafting, "_after", counted)
    hidden = HiddenDrafting()
    hidden.step_sent("t1", 0, 0)
    for number in range(1000):
        for worker, role in (("d0", Role.DRAFT), ("t0", Role.TARGET)):
            hidden.step_sent(worker, number, 2 * number)
            hidden.step_replied(role, worker, number, (2 * number, 2 * number + 1))
    assert hidden.seconds == 1000
    assert len(hidden._drafting) == len(hidden._verifying) == 1000
    assert sum(looked_at) <= 3000
