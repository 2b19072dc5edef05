"""What a scheduler service tells those who count, record or trace what happens in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.messages import EmitTokens, RefusalCause, Role, RowResult, SendStep, SequenceRequest

FAILED = "failed"
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """`outcome` is the value of a FinishReason, FAILED or REFUSED; for these two `error` says why.

    `cause` is that of a refusal.
    """

    outcome: str
    error: str | None = None
    cause: RefusalCause | None = None


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where a worker's time for one step went, in seconds, and how many rows its pass had.

    `queued`: between the step's arrival and its start; `idle`: between the end of the step before and this one's start,
    the worker having nothing to do; `prepare`: checking rows, allocating pages, packing inputs, and of that `realign`:
    what rows of unequal length cost on top; `total`: from start to end.
    """

    queued: float = 0.0
    idle: float = 0.0
    prepare: float = 0.0
    realign: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    total: float = 0.0
    packed_rows: int = 0
    padding_rows: int = 0


class ServiceObserver:
    """Hears everything and does nothing with it: to be overridden where it matters.

    Calls come from the event loop and must not block. `now` is in seconds on one monotonic clock.
    """

    def sequence_entered(self, request: SequenceRequest, request_id: str, traceparent: str, now: float) -> None:
        """`request_id` is the client's, `traceparent` that of W3C Trace Context, empty where nothing is traced."""

    def step_sent(self, role: Role, step: SendStep, now: float) -> None:
        """To a worker of that role."""

    def step_replied(
        self, role: Role, step: SendStep, results: tuple[RowResult, ...], timings: StepTimings, now: float
    ) -> None:
        """One result for each row of the step, in their order."""

    def tokens_emitted(self, emissions: Sequence[EmitTokens]) -> None:
        """One at least, of different sequences."""

    def sequence_ended(self, sequence_id: int, end: SequenceEnd, now: float) -> None:
        """Once for each sequence that entered."""

    def worker_lost(self, role: Role, worker_id: str, sequences: int) -> None:
        """So many sequences were at home there. Steps of it that were not answered never will be."""

    def targets_changed(self, targets: int) -> None:
        """So many target workers are in use now that are not about to leave."""

    def core_ran(self, seconds: float) -> None:
        """The scheduler core has just computed for `seconds`."""
