"""Converts what gateways and schedulers say of sequences to and from the messages of protos/scheduler.proto."""

from __future__ import annotations

from protos import scheduler_pb2
from scheduler.messages import FinishReason, RefusalCause, SequenceRequest, Suspicion
from scheduler.sampling import SamplingParameters
from services.backend.interface import (
    BackendUnavailableError,
    DeadlineExceededError,
    GenerationRequest,
    LoadFigures,
    ModelInfo,
    WorkerLoad,
)
from services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError, TokenDelta
from services.rpc.worker_codec import (
    logprobs_from_wire,
    logprobs_to_wire,
    role_from_wire,
    sampling_from_wire,
    sampling_to_wire,
)

_ENDS = {
    FinishReason.STOP: scheduler_pb2.SEQUENCE_END_STOP,
    FinishReason.LENGTH: scheduler_pb2.SEQUENCE_END_LENGTH,
    FinishReason.CANCELLED: scheduler_pb2.SEQUENCE_END_CANCELLED,
}
_ENDS_BACK = {number: reason for reason, number in _ENDS.items()}
_CAUSES = {
    RefusalCause.QUEUE_FULL: scheduler_pb2.REFUSAL_CAUSE_QUEUE_FULL,
    RefusalCause.TOO_LONG: scheduler_pb2.REFUSAL_CAUSE_TOO_LONG,
    RefusalCause.INVALID: scheduler_pb2.REFUSAL_CAUSE_INVALID,
    RefusalCause.KEY_LIMIT: scheduler_pb2.REFUSAL_CAUSE_KEY_LIMIT,
}
_CAUSES_BACK = {number: cause for cause, number in _CAUSES.items()}


def submission_to_wire(
    request_id: int,
    request: GenerationRequest,
    committed_output: list[int],
    admitted_before: bool,
    timeout_seconds: float | None,
    suspicion: Suspicion,
) -> scheduler_pb2.SequenceSubmission:
    return scheduler_pb2.SequenceSubmission(
        request_id=request_id,
        prompt=request.prompt,
        max_tokens=request.max_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        sampling=sampling_to_wire(request.sampling),
        draft_length=request.draft_length,
        top_logprobs=request.top_logprobs,
        committed_output=committed_output,
        admitted_before=admitted_before,
        timeout_seconds=timeout_seconds,
        client_request_id=request.request_id,
        traceparent=request.traceparent,
        key=request.key,
        priority=request.priority,
        prompt_logprobs=request.prompt_logprobs,
        suspicion=suspicion_to_wire(suspicion) if suspicion.count else None,
    )


def suspicion_to_wire(suspicion: Suspicion) -> scheduler_pb2.Suspicion:
    return scheduler_pb2.Suspicion(count=suspicion.count, tokens=suspicion.tokens)


def suspicion_from_wire(message: scheduler_pb2.Suspicion) -> Suspicion:
    return Suspicion(message.count, message.tokens)


def request_from_wire(sequence_id: int, submission: scheduler_pb2.SequenceSubmission) -> SequenceRequest:
    """Raises ValueError naming the field that is out of range."""
    sampling = sampling_from_wire(submission.sampling) if submission.HasField("sampling") else SamplingParameters()
    return SequenceRequest(
        sequence_id=sequence_id,
        prompt=tuple(submission.prompt),
        max_tokens=submission.max_tokens,
        stop_token_ids=frozenset(submission.stop_token_ids),
        sampling=sampling,
        draft_length=submission.draft_length if submission.HasField("draft_length") else None,
        top_logprobs=submission.top_logprobs if submission.HasField("top_logprobs") else None,
        committed_output=tuple(submission.committed_output),
        admitted_before=submission.admitted_before,
        key=submission.key,
        priority=submission.priority,
        prompt_logprobs=submission.prompt_logprobs if submission.HasField("prompt_logprobs") else None,
        suspicion=suspicion_from_wire(submission.suspicion),
    )


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
        event.finished = _ENDS[outcome]
    elif isinstance(outcome, AdmissionRefusedError):
        event.refused.cause = _CAUSES[outcome.cause]
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
        reason = _ENDS_BACK.get(event.finished)
        if reason is None:
            raise ValueError(f"end of a sequence is {event.finished}, which is not known")
        return reason
    if kind == "refused":
        cause = _CAUSES_BACK.get(event.refused.cause)
        if cause is None:
            raise ValueError(f"cause of a refusal is {event.refused.cause}, which is not known")
        retry_after = event.refused.retry_after_seconds or None
        return AdmissionRefusedError(cause, event.refused.message, retry_after_seconds=retry_after)
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
            role_from_wire(worker.role),
            worker.sequences,
            worker.total_pages - worker.free_pages,
            worker.total_pages,
        )
        for worker in status.workers
        if worker.state == scheduler_pb2.WORKER_STATE_IN_USE
    )
    return LoadFigures(status.live_set.live, status.live_set.waiting, workers)
