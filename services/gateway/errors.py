"""Errors for clients of both APIs."""

from __future__ import annotations

import logging
import math
from enum import Enum

from spool.scheduler.errors import SpoolError
from spool.scheduler.messages import RefusalCause
from spool.services.backend.interface import BackendUnavailableError, DeadlineExceededError
from spool.services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError
from spool.services.observability.request_ids import note_figures
from spool.services.text.chat_template import ChatTemplateError

logger = logging.getLogger(__name__)


class ErrorKind(Enum):
    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    METHOD = "method"
    TOO_LARGE = "too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    SLOW_BODY = "slow_body"
    QUEUE_FULL = "queue_full"
    KEY_LIMIT = "key_limit"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    FAILED = "failed"


class RequestError(SpoolError):
    """A request that is refused or fails. `param` names the field at fault; `code` is for programs.

    `retry_after_seconds` says when to try again, if that is known.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self._retry_after_seconds = retry_after_seconds

    @property
    def retry_after(self) -> int | None:
        """Whole seconds after which to try again; None if trying again does not help."""
        if self.kind not in (ErrorKind.QUEUE_FULL, ErrorKind.KEY_LIMIT, ErrorKind.UNAVAILABLE):
            return None
        return max(1, math.ceil(self._retry_after_seconds or 0))


def invalid(message: str, param: str | None, code: str | None = None) -> RequestError:
    return RequestError(ErrorKind.INVALID, message, param=param, code=code)


def note_error(error: RequestError) -> None:
    """The line of the log at the request's end names the error and the field at fault; what that held stays private."""
    note_figures(error=error.code or error.kind.value, param=error.param)


_REFUSALS = {
    RefusalCause.QUEUE_FULL: (ErrorKind.QUEUE_FULL, "queue_full", None),
    RefusalCause.TOO_LONG: (ErrorKind.INVALID, "context_length_exceeded", "max_tokens"),
    RefusalCause.INVALID: (ErrorKind.INVALID, "invalid_value", None),
    RefusalCause.KEY_LIMIT: (ErrorKind.KEY_LIMIT, "rate_limit_exceeded", None),
}


def request_error(error: Exception) -> RequestError:
    """The error for a client that an error of the layers below becomes. An internal fault is logged."""
    match error:
        case RequestError():
            return error
        case AdmissionRefusedError():
            kind, code, param = _REFUSALS[error.cause]
            seconds = error.retry_after_seconds
            return RequestError(kind, str(error), param=param, code=code, retry_after_seconds=seconds)
        case BackendUnavailableError():
            return RequestError(ErrorKind.UNAVAILABLE, str(error), code="unavailable")
        case DeadlineExceededError():
            return RequestError(ErrorKind.DEADLINE, str(error), code="deadline_exceeded")
        case SequenceFailedError():
            return RequestError(ErrorKind.FAILED, str(error), code="sequence_failed")
        case ChatTemplateError():
            return invalid(str(error), "messages", "invalid_messages")
    logger.error("the request failed", exc_info=error)
    return RequestError(ErrorKind.FAILED, "the server failed on this request; its log says why", code="internal")
