"""What happened to sequences: changes of state, of those that the core's table allows, and events in each state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum

from scheduler.messages import (
    Event,
    KvMoved,
    SequenceCancelled,
    StepCompleted,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerSpec,
)
from scheduler.state.fleet import Fleet
from scheduler.state.live_set import LiveSet
from scheduler.state.sequence_record import SequenceState
from scheduler.state.workers import Sequence, Worker
from scheduler.transitions.table import TRANSITIONS, Cause

Change = tuple[SequenceState, Cause]


class Happening(Enum):
    """An event, as one sequence sees it."""

    TARGET_ANSWERS = "target answers"
    DRAFT_ANSWERS = "draft answers"
    FORMER_WORKER_ANSWERS = "former worker answers"
    """One that it has left since."""
    CANCELLED = "client cancels"
    TARGET_LOST = "target lost"
    DRAFT_LOST = "draft lost"
    NEXT_TARGET_LOST = "next target lost"
    """The one that it moves to."""
    TARGET_DRAINS = "target drains"
    KV_ARRIVES = "KV arrives"
    KV_IS_LOST = "KV does not arrive"


Meeting = tuple[SequenceState, Happening]


def name_of(change: Change | Meeting) -> str:
    state, cause = change
    return f"{state.value}: {cause.value}"


ALL_CHANGES = tuple(name_of((state, cause)) for state, causes in TRANSITIONS.items() for cause in causes)
PREPARED = name_of((SequenceState.VERIFYING, Cause.PREPARED))
ALL_MEETINGS = tuple(name_of((state, event)) for state, causes in TRANSITIONS.items() if causes for event in Happening)
"""Of all states that are not ends, whether or not the core can be there when it happens."""


def meetings(event: Event, live: LiveSet, fleet: Fleet) -> Iterator[Meeting]:
    """What an event that is about to be applied is to whom."""
    match event:
        case SequenceCancelled():
            for sequence in _live(live, [event.sequence_id]):
                yield sequence.state, Happening.CANCELLED
        case StepCompleted():
            worker = fleet.find(event.worker_id)
            for sequence in _live(live, (result.sequence_id for result in event.results)):
                if worker is not None and worker is sequence.target:
                    yield sequence.state, Happening.TARGET_ANSWERS
                elif worker is not None and worker is sequence.draft:
                    yield sequence.state, Happening.DRAFT_ANSWERS
                else:
                    yield sequence.state, Happening.FORMER_WORKER_ANSWERS
        case WorkerLost(worker_id=worker_id) | WorkerJoined(worker=WorkerSpec(worker_id=worker_id)):
            for sequence in _of(worker_id, fleet):
                if _is(sequence.target, worker_id):
                    yield sequence.state, Happening.TARGET_LOST
                elif _is(sequence.draft, worker_id):
                    yield sequence.state, Happening.DRAFT_LOST
                else:
                    yield sequence.state, Happening.NEXT_TARGET_LOST
        case WorkerDraining():
            for sequence in _of(event.worker_id, fleet):
                if _is(sequence.target, event.worker_id):
                    yield sequence.state, Happening.TARGET_DRAINS
        case KvMoved():
            for sequence in live.sequences.values():
                if sequence.kv_move is not None and sequence.kv_move.move_id == event.move_id:
                    yield sequence.state, Happening.KV_ARRIVES if event.moved else Happening.KV_IS_LOST


def _live(live: LiveSet, sequence_ids: Iterable[int]) -> list[Sequence]:
    return [live.sequences[sequence_id] for sequence_id in sequence_ids if sequence_id in live.sequences]


def _of(worker_id: str, fleet: Fleet) -> list[Sequence]:
    worker = fleet.find(worker_id)
    return [] if worker is None else list(worker.sequences.values())


def _is(worker: Worker | None, worker_id: str) -> bool:
    return worker is not None and worker.worker_id == worker_id


def named(seen: Mapping[Change, int] | Mapping[Meeting, int]) -> Counter[str]:
    """How often each was seen, by name, in the order of the table."""
    by_name = {name_of(change): count for change, count in seen.items()}
    return Counter({name: by_name[name] for name in (*ALL_CHANGES, *ALL_MEETINGS) if name in by_name})


def never_seen(seen: Mapping[str, int], names: Iterable[str] = ALL_CHANGES) -> list[str]:
    """Of these names, in their order."""
    return [name for name in names if not seen.get(name)]
