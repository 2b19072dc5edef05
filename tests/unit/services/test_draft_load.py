"""How busy a draft worker is, by the seconds that it says it has computed."""

from __future__ import annotations

import pytest

from spool.services.scheduler.workers.draft_load import DraftLoad


def test_the_share_is_that_of_the_last_seconds() -> None:
    load = DraftLoad()
    assert load.busy_share == 0.0
    busy = 0.0
    # Idle for a minute, then busy for a fifth of each second, then always.
    for now in range(120):
        busy += 0.0 if now < 60 else 0.2 if now < 90 else 1.0
        load.hear(1, busy, 0, float(now))
        if now in (59, 89, 119):
            expected = {59: 0.0, 89: 0.2, 119: 1.0}[now]
            assert load.busy_share == pytest.approx(expected)


def test_each_registration_tells_what_has_passed_since_the_one_before() -> None:
    load = DraftLoad()
    assert load.hear(1, 3.0, 0, 100.0) == (0.0, 0.0)
    assert load.hear(1, 3.5, 4, 102.0) == (2.0, 0.5)
    assert (load.busy_share, load.queued) == (0.25, 4)


@pytest.mark.parametrize(("epoch", "busy"), [(2, 7.0), (2, 0.5), (1, 0.5)])
def test_another_start_begins_anew(epoch: int, busy: float) -> None:
    load = DraftLoad()
    load.hear(1, 3.0, 0, 100.0)
    load.hear(1, 5.0, 9, 102.0)
    assert load.hear(epoch, busy, 0, 103.0) == (0.0, 0.0)
    assert (load.busy_share, load.queued) == (0.0, 0)
    assert load.hear(epoch, busy + 0.5, 0, 104.0) == (1.0, 0.5)
    assert load.busy_share == 0.5


def test_more_seconds_than_have_passed_are_all_of_them() -> None:
    load = DraftLoad()
    load.hear(1, 0.0, 0, 0.0)
    load.hear(1, 8.0, 0, 2.0)
    assert load.busy_share == 1.0
