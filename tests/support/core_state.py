"""What must hold of a scheduler core once it has planned, by what it says of itself."""

from __future__ import annotations

from collections import Counter

from spool.scheduler.core import SchedulerCore
from spool.scheduler.messages import Role, SequenceState


def check_state(core: SchedulerCore) -> None:
    """Raises AssertionError unless each live sequence has one state and one place, is counted there, and goes on."""
    snapshot = core.snapshot()
    sequences = core.sequences(snapshot.live + 1)
    states = Counter(one.state for one in sequences)
    counted = {state: getattr(snapshot, state.value) for state in SequenceState if state is not SequenceState.ENDED}
    targets = {one.worker_id: one for one in snapshot.workers if one.role is Role.TARGET}
    placed = Counter(one.target_id for one in sequences if one.target_id is not None)
    resting = {name for name, target in targets.items() if not target.steps_in_flight}
    broken = {
        "states are miscounted": states != Counter(counted) or snapshot.running != states.total() - snapshot.waiting,
        "live sequences are miscounted": snapshot.live != len(sequences),
        "sequences of keys are miscounted": (snapshot.running, snapshot.waiting)
        != (sum(key.running for key in snapshot.keys), sum(key.waiting for key in snapshot.keys)),
        "one waits on a target, or runs without one": any(
            (one.target_id is None) != (one.state is SequenceState.WAITING) for one in sequences
        ),
        # A sequence that moves is at both ends.
        "sequences of targets are miscounted": any(count > targets[name].sequences for name, count in placed.items())
        or sum(target.sequences for target in targets.values()) != snapshot.running + snapshot.moving,
        "pages are miscounted": any(
            not 0 <= target.free_pages <= target.total_pages - target.sequences for target in targets.values()
        ),
        "a target has no step, and a sequence that could go on": any(
            one.target_id in resting and one.state is not SequenceState.MOVING for one in sequences
        ),
    }
    problems = [rule for rule, is_broken in broken.items() if is_broken]
    assert not problems, f"{'; '.join(problems)}: {snapshot}"
