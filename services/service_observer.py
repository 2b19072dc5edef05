"""What a scheduler service tells those who count, record or trace what happens in it."""

from __future__ import annotations

from dataclasses import dataclass

from protos import worker_pb2
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


class ServiceObserver:
    """Hears everything and does nothing with it: to be overridden where it matters.

    Calls come from the event loop and must not block. `now` is in seconds on one monotonic clock.
    """

    def sequence_entered(self, request: SequenceRequest, traceparent: str, now: float) -> None:
        """`traceparent` is that of W3C Trace Context, empty where nothing is traced."""

    def step_sent(self, role: Role, step: SendStep, now: float) -> None:
        """To a worker of that role."""

    def step_replied(
        self, role: Role, step: SendStep, results: tuple[RowResult, ...], timings: worker_pb2.StepTimings, now: float
    ) -> None:
        """One result for each row of the step, in their order."""

    def tokens_emitted(self, emission: EmitTokens) -> None: ...

    def sequence_ended(self, sequence_id: int, end: SequenceEnd, now: float) -> None:
        """Once for each sequence that entered."""

    def worker_lost(self, role: Role, worker_id: str, sequences: int) -> None:
        """So many sequences were at home there. Steps of it that were not answered never will be."""

    def core_ran(self, seconds: float) -> None:
        """The scheduler core computed for so long, just now."""
