"""What a gateway asks of a scheduler, and how that can fail."""

from __future__ import annotations

from dataclasses import dataclass, field

from spool.scheduler.errors import SpoolError
from spool.scheduler.messages import SequenceRequest


@dataclass(frozen=True, slots=True)
class GenerationRequest(SequenceRequest):
    """A sequence that a scheduler has yet to number.

    `deadline_seconds` counts from the submission; None: no deadline. `request_id` is the client's, for logs alone, and
    `traceparent` for traces. The scheduler refuses what is out of range.
    """

    sequence_id: int = field(default=0, init=False)
    deadline_seconds: float | None = None
    request_id: str = ""
    traceparent: str = ""


class BackendUnavailableError(SpoolError, RuntimeError):
    """No target worker or no scheduler can be reached. Trying again later can help."""


class DeadlineExceededError(SpoolError, RuntimeError):
    """The request's deadline passed before its sequence was finished; the sequence is cancelled."""
