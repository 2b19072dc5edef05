"""Converts what gateways and schedulers say of sequences to and from the messages of protos/scheduler.proto."""

from __future__ import annotations

from spool.protos import scheduler_pb2
from spool.scheduler.messages import EmitTokens, FinishReason, RefusalCause, SequenceRequest
from spool.services.backend.interface import BackendUnavailableError, DeadlineExceededError
from spool.services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError
from spool.services.rpc.conversion import WireEnum, from_wire
from spool.services.rpc.worker_codec import logprobs_from_wire, logprobs_to_wire

_ENDS = WireEnum(FinishReason, scheduler_pb2.SequenceEnd, "SEQUENCE_END_")
_CAUSES = WireEnum(RefusalCause, scheduler_pb2.RefusalCause, "REFUSAL_CAUSE_")

# Other failures come from a worker.
_FAILURES = (
    (DeadlineExceededError, scheduler_pb2.FAILURE_CAUSE_DEADLINE_EXCEEDED),
    (BackendUnavailableError, scheduler_pb2.FAILURE_CAUSE_NO_TARGET),
)


def request_from_wire(sequence_id: int, submission: scheduler_pb2.SequenceSubmission) -> SequenceRequest:
    """Raises ValueError naming the field that is out of range."""
    return from_wire(SequenceRequest, submission, sequence_id=sequence_id)


def write_output(emission: EmitTokens, event: scheduler_pb2.SequenceEvent) -> None:
    event.tokens.extend(emission.tokens)
    if emission.drafted:
        event.drafted = emission.drafted
        event.accepted = emission.accepted
    if emission.logits_digests:
        event.logits_digests.extend(emission.logits_digests)
    if emission.logprobs:
        event.logprobs.extend(logprobs_to_wire(logprobs) for logprobs in emission.logprobs)
    if emission.prompt_logprobs:
        event.prompt_logprobs.extend(logprobs_to_wire(logprobs) for logprobs in emission.prompt_logprobs)
    if emission.cached:
        event.cached_prompt_tokens = emission.cached


def read_output(event: scheduler_pb2.SequenceEvent) -> EmitTokens:
    """Raises ValueError where log probabilities or digests do not fit the tokens."""
    if event.logits_digests and len(event.logits_digests) != len(event.tokens):
        raise ValueError(f"{len(event.logits_digests)} digests of logits came with {len(event.tokens)} tokens")
    if event.logprobs and len(event.logprobs) != len(event.tokens):
        raise ValueError(f"{len(event.logprobs)} log probabilities came with {len(event.tokens)} tokens")
    return EmitTokens(
        event.request_id,
        tuple(event.tokens),
        event.drafted,
        event.accepted,
        tuple(event.logits_digests),
        logprobs=tuple(logprobs_from_wire(logprobs) for logprobs in event.logprobs),
        prompt_logprobs=tuple(logprobs_from_wire(logprobs) for logprobs in event.prompt_logprobs),
        cached=event.cached_prompt_tokens,
    )


def write_end(outcome: FinishReason | Exception, retry_after: float, event: scheduler_pb2.SequenceEvent) -> None:
    """Writes how a sequence ended. `retry_after` (seconds) is sent only where trying again can help."""
    if isinstance(outcome, FinishReason):
        event.finished = _ENDS.to_wire(outcome)
    elif isinstance(outcome, AdmissionRefusedError):
        event.refused.cause = _CAUSES.to_wire(outcome.cause)
        event.refused.message = str(outcome)
        if outcome.cause in (RefusalCause.QUEUE_FULL, RefusalCause.KEY_LIMIT):
            event.refused.retry_after_seconds = retry_after
    else:
        causes = [cause for kind, cause in _FAILURES if isinstance(outcome, kind)]
        event.failed.cause = causes[0] if causes else scheduler_pb2.FAILURE_CAUSE_WORKER
        event.failed.message = str(outcome)


def read_end(event: scheduler_pb2.SequenceEvent) -> FinishReason | Exception | None:
    """How the sequence ended; None where the sequence goes on. Raises ValueError for an unknown end."""
    match event.WhichOneof("end"):
        case None:
            return None
        case "finished":
            return _ENDS.from_wire(event.finished)
        case "refused":
            cause, seconds = _CAUSES.from_wire(event.refused.cause), event.refused.retry_after_seconds or None
            return AdmissionRefusedError(cause, event.refused.message, retry_after_seconds=seconds)
    kinds = [kind for kind, cause in _FAILURES if cause == event.failed.cause]
    return (kinds[0] if kinds else SequenceFailedError)(event.failed.message)
