"""Which sequences may be the reason that workers are lost.

A row can kill its worker, make it hang, or make its whole step fail. The row would do so again wherever it is sent, and
a sequence that came back to the queue without a mark could take every worker with it. So a loss makes suspects of all
sequences that had a row in flight there. A suspect's rows are alone in their steps (`TargetPlanner`): whoever is on a
second target that is lost is the culprit, and fails. The others make progress and are cleared; with each suspicion a
sequence has to come twice as far for that. The mark goes with a sequence to other schedulers
(`SuspectSequence`): else it could take the targets of one cell after the other.
"""

from __future__ import annotations

from collections.abc import Callable

from spool.scheduler.messages import Command, SuspectSequence, Suspicion
from spool.scheduler.state.workers import Sequence, TargetWorker
from spool.scheduler.transitions.lifecycle import Lifecycle

_MAX_DOUBLINGS = 20
"""More tokens than any output has."""


def in_flight(target: TargetWorker) -> list[Sequence]:
    """The sequences that the target computes, or has queued."""
    return [target.sequences[sequence_id] for sequence_id, row in target.in_flight.items() if not row.abandoned]


def blame(sequences: list[Sequence], worker_id: str, reason: str, lifecycle: Lifecycle) -> None:
    """A target was lost with rows of these sequences in flight. They are in the queue again."""
    for sequence in sequences:
        if not sequence.suspected:
            suspect(sequence, lifecycle.emit)
            continue
        lifecycle.fail(
            sequence,
            f"a target worker was lost while it computed this sequence, and then target worker {worker_id}, while it "
            f"computed nothing else{': ' if reason else ''}{reason}",
        )


def suspect(sequence: Sequence, emit: Callable[[Command], None]) -> None:
    """Marks a sequence that waits, or whose state is about to change: its target's indexes follow then."""
    sequence.suspected = True
    tokens = 1 << min(sequence.suspicions, _MAX_DOUBLINGS)
    sequence.suspected_until = sequence.length + tokens
    sequence.suspicions += 1
    emit(SuspectSequence(sequence.sequence_id, Suspicion(sequence.suspicions, tokens)))


def clear(sequence: Sequence) -> None:
    """Takes the mark from a suspect that has come far enough; its state is about to change."""
    if sequence.suspected and sequence.length >= sequence.suspected_until:
        sequence.suspected = False
