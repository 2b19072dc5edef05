"""What a scheduler service tells those who count, record or trace what happens in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spool.scheduler.messages import EmitTokens, RefusalCause, Role, SendStep, SequenceRequest, StepCompleted

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
    """Where a target's time for one step went, in seconds, and how many rows its pass had.

    `queued`: between the step's arrival and its start; `idle`: between the end of the step before and this one's start,
    the worker having nothing to do; `prepare`: checking rows, allocating pages, packing inputs, and of that `realign`:
    what rows of unequal length cost on top; `drafting`: proposing since the step before, and waiting for a draft worker
    to; `total`: from start to end, and what was proposed before the start.
    """

    queued: float = 0.0
    idle: float = 0.0
    prepare: float = 0.0
    realign: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    total: float = 0.0
    drafting: float = 0.0
    packed_rows: int = 0
    padding_rows: int = 0


class ServiceObserver:
    """Hears everything and does nothing with it: to be overridden where it matters.

    Calls come from the event loop and must not block. `now` is in seconds on one monotonic clock.
    """

    def sequence_entered(self, request: SequenceRequest, request_id: str, traceparent: str, now: float) -> None:
        """`request_id` is the client's, `traceparent` that of W3C Trace Context, empty where nothing is traced."""

    def step_sent(self, step: SendStep, now: float) -> None:
        """To a target."""

    def step_replied(self, step: SendStep, answer: StepCompleted, timings: StepTimings, now: float) -> None:
        """The target has answered the step."""

    def draft_registered(self, worker_id: str, seconds: float, busy_seconds: float, now: float) -> None:
        """Since it registered before, `seconds` ago, the draft worker has computed for `busy_seconds`."""

    def tokens_emitted(self, emissions: Sequence[EmitTokens]) -> None:
        """One at least, of different sequences."""

    def sequence_ended(self, sequence_id: int, end: SequenceEnd, now: float) -> None:
        """Once for each sequence that entered."""

    def worker_lost(self, role: Role, worker_id: str, sequences: int) -> None:
        """So many sequences were at home there, or on targets that the draft worker served. Steps of it that were not
        answered never will be."""

    def targets_changed(self, targets: int) -> None:
        """So many target workers are in use now that are not about to leave."""

    def core_ran(self, seconds: float) -> None:
        """The scheduler core has just computed for `seconds`."""
