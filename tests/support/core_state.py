"""What must hold of a scheduler core at any moment, by what it says of itself."""

from __future__ import annotations

from collections import Counter

from scheduler.core import SchedulerCore
from scheduler.messages import Role, SequenceState


def check_state(core: SchedulerCore) -> None:
    """Every live sequence is in one state and at one place, and is counted there once."""
    snapshot = core.snapshot()
    sequences = core.sequences(snapshot.live + 1)
    states = Counter(one.state for one in sequences)
    assert snapshot.live == len(sequences) == snapshot.waiting + snapshot.running
    counted = Counter(
        {state: getattr(snapshot, state.value) for state in SequenceState if state is not SequenceState.ENDED}
    )
    assert states == counted
    assert all((one.target_id is None) == (one.state is SequenceState.WAITING) for one in sequences)
    assert (snapshot.running, snapshot.waiting) == tuple(
        sum(counts) for counts in zip(*((key.running, key.waiting) for key in snapshot.keys), strict=True)
    )
    targets = {one.worker_id: one for one in snapshot.workers if one.role is Role.TARGET}
    placed = Counter(one.target_id for one in sequences if one.target_id is not None)
    assert all(count <= targets[name].sequences for name, count in placed.items())
    # A sequence that moves has pages at both ends.
    assert sum(target.sequences for target in targets.values()) == snapshot.running + snapshot.moving
    assert all(0 <= target.free_pages <= target.total_pages - target.sequences for target in targets.values())
    resting = {name for name, target in targets.items() if not target.steps_in_flight}
    waits = [one for one in sequences if one.target_id in resting and one.state is not SequenceState.MOVING]
    assert not waits, f"targets without a step have {waits}"
