"""Which changes of a sequence's state were seen, of those that the core's table allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from scheduler.state.sequence_record import SequenceState
from scheduler.transitions.table import TRANSITIONS, Cause

Change = tuple[SequenceState, Cause]


def name_of(change: Change) -> str:
    state, cause = change
    return f"{state.value}: {cause.value}"


ALL_CHANGES = tuple(name_of((state, cause)) for state, causes in TRANSITIONS.items() for cause in causes)


def named(changes: Mapping[Change, int]) -> Counter[str]:
    """How often each was seen, by name, in the order of the table."""
    by_name = {name_of(change): count for change, count in changes.items()}
    return Counter({name: by_name[name] for name in ALL_CHANGES if name in by_name})


def never_seen(changes: Mapping[str, int]) -> list[str]:
    """By name, in the order of the table."""
    return [name for name in ALL_CHANGES if not changes.get(name)]
