"""What the simulation counts of itself: which event met a sequence in which state."""

from __future__ import annotations

from tests.sim.cell.coverage import ALL_MEETINGS, never_seen
from tests.sim.cell.schedule import run_schedule


def test_events_are_counted_by_the_state_that_they_meet() -> None:
    quiet, crashes = run_schedule(2, kinds=()), run_schedule(2, kinds=("worker crash",))
    for result in (quiet, crashes):
        # A proposal, a verification and a chunk of a prompt are awaited in one state each.
        assert result.meetings["drafting: draft answers"] >= result.changes["drafting: proposed"] > 0
        assert result.meetings["verifying: target answers"] >= result.changes["verifying: ended"] > 0
        assert result.meetings["prefilling: target answers"] > 0
        assert not any(result.meetings[f"waiting: {whose} answers"] for whose in ("target", "draft"))
    lost = [name for name in ALL_MEETINGS if name.endswith("lost")]
    assert set(never_seen(quiet.meetings, lost)) == set(lost)
    # Every sequence of a target that dies goes back to the queue.
    died = sum(count for name, count in crashes.meetings.items() if name.endswith(": target lost"))
    returned = sum(count for name, count in crashes.changes.items() if name.endswith(": returned"))
    assert 0 < died <= returned
    assert set(crashes.meetings) <= set(ALL_MEETINGS)
