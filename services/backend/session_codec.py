"""Converts what gateways and schedulers say of sequences to and from the messages of protos/scheduler.proto."""

from __future__ import annotations

from protos import scheduler_pb2
from scheduler.messages import FinishReason, RefusalCause, SequenceRequest
from services.backend.interface import (
    BackendUnavailableError,
    DeadlineExceededError,
    LoadFigures,
    ModelInfo,
    WorkerLoad,
)
from services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError, TokenDelta
from services.rpc.conversion import WireEnum, from_wire
from services.rpc.worker_codec import ROLES, logprobs_from_wire, logprobs_to_wire

_ENDS = WireEnum(FinishReason, scheduler_pb2.SequenceEnd, "SEQUENCE_END_")
_CAUSES = WireEnum(RefusalCause, scheduler_pb2.RefusalCause, "REFUSAL_CAUSE_")


def request_from_wire(sequence_id: int, submission: scheduler_pb2.SequenceSubmission) -> SequenceRequest:
    """Raises ValueError naming the field that is out of range."""
    return from_wire(SequenceRequest, submission, sequence_id=sequence_id)


def write_delta(delta: TokenDelta, event: scheduler_pb2.SequenceEvent) -> None:
    event.tokens.extend(delta.tokens)
    event.drafted = delta.drafted
    event.accepted = delta.accepted
    event.logprobs.extend(logprobs_to_wire(logprobs) for logprobs in delta.logprobs)
    event.prompt_logprobs.extend(logprobs_to_wire(logprobs) for logprobs in delta.prompt_logprobs)
    event.cached_prompt_tokens = delta.cached


def read_delta(event: scheduler_pb2.SequenceEvent) -> TokenDelta:
    """Raises ValueError where log probabilities do not fit the tokens."""
    if event.logprobs and len(event.logprobs) != len(event.tokens):
        raise ValueError(f"{len(event.logprobs)} log probabilities came with {len(event.tokens)} tokens")
    return TokenDelta(
        tuple(event.tokens),
        event.drafted,
        event.accepted,
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
    elif isinstance(outcome, DeadlineExceededError):
        event.failed.cause = scheduler_pb2.FAILURE_CAUSE_DEADLINE_EXCEEDED
        event.failed.message = str(outcome)
    elif isinstance(outcome, BackendUnavailableError):
        event.failed.cause = scheduler_pb2.FAILURE_CAUSE_NO_TARGET
        event.failed.message = str(outcome)
    else:
        event.failed.cause = scheduler_pb2.FAILURE_CAUSE_WORKER
        event.failed.message = str(outcome)


def read_end(event: scheduler_pb2.SequenceEvent) -> FinishReason | Exception | None:
    """How the sequence ended; None where the sequence goes on. Raises ValueError for an unknown end."""
    kind = event.WhichOneof("end")
    if kind is None:
        return None
    if kind == "finished":
        return _ENDS.from_wire(event.finished)
    if kind == "refused":
        cause, seconds = _CAUSES.from_wire(event.refused.cause), event.refused.retry_after_seconds or None
        return AdmissionRefusedError(cause, event.refused.message, retry_after_seconds=seconds)
    if event.failed.cause == scheduler_pb2.FAILURE_CAUSE_DEADLINE_EXCEEDED:
        return DeadlineExceededError(event.failed.message)
    if event.failed.cause == scheduler_pb2.FAILURE_CAUSE_NO_TARGET:
        return BackendUnavailableError(event.failed.message)
    return SequenceFailedError(event.failed.message)


def model_from_wire(status: scheduler_pb2.StatusReply) -> ModelInfo | None:
    """What the targets serve; None where no target has been up yet."""
    if not status.HasField("model"):
        return None
    served = status.model
    return ModelInfo(served.model_id, served.vocabulary_size, served.max_sequence_length, served.tokenizer_digest)


def load_from_wire(status: scheduler_pb2.StatusReply) -> LoadFigures:
    workers = tuple(
        WorkerLoad(
            worker.worker_id,
            ROLES.from_wire(worker.role),
            worker.sequences,
            worker.total_pages - worker.free_pages,
            worker.total_pages,
        )
        for worker in status.workers
        if worker.state == scheduler_pb2.WORKER_STATE_IN_USE
    )
    return LoadFigures(status.live_set.live, status.live_set.waiting, workers)
