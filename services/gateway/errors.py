"""Errors that a client is told about, independent of how it came in."""

from __future__ import annotations

from enum import Enum

from scheduler.messages import RefusalCause
from services.backend import BackendUnavailableError, DeadlineExceededError
from services.chat_template import ChatTemplateError
from services.sequence_stream import AdmissionRefusedError, SequenceFailedError


class ErrorKind(Enum):
    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    NOT_FOUND = "not_found"
    METHOD = "method"
    TOO_LARGE = "too_large"
    SLOW_BODY = "slow_body"
    QUEUE_FULL = "queue_full"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    FAILED = "failed"


class RequestError(Exception):
    """A request that does not end as asked for. `param` names the field at fault, `code` is for programs."""

    def __init__(self, kind: ErrorKind, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code

    @property
    def retry_helps(self) -> bool:
        return self.kind in (ErrorKind.QUEUE_FULL, ErrorKind.UNAVAILABLE)


UNEXPECTED = RequestError(ErrorKind.FAILED, "the server failed on this request; its log says why", code="internal")


def invalid(message: str, param: str | None, code: str | None = None) -> RequestError:
    return RequestError(ErrorKind.INVALID, message, param=param, code=code)


_REFUSALS = {
    RefusalCause.QUEUE_FULL: (ErrorKind.QUEUE_FULL, "queue_full", None),
    RefusalCause.TOO_LONG: (ErrorKind.INVALID, "context_length_exceeded", "max_tokens"),
    RefusalCause.INVALID: (ErrorKind.INVALID, "invalid_value", None),
}


def request_error(error: Exception) -> RequestError | None:
    """What a client is told of an error from below; None for one that is a fault of ours."""
    match error:
        case RequestError():
            return error
        case AdmissionRefusedError():
            kind, code, param = _REFUSALS[error.cause]
            return RequestError(kind, str(error), param=param, code=code)
        case BackendUnavailableError():
            return RequestError(ErrorKind.UNAVAILABLE, str(error), code="unavailable")
        case DeadlineExceededError():
            return RequestError(ErrorKind.DEADLINE, str(error), code="deadline_exceeded")
        case SequenceFailedError():
            return RequestError(ErrorKind.FAILED, str(error), code="sequence_failed")
        case ChatTemplateError():
            return invalid(str(error), "messages", "invalid_messages")
    return None
