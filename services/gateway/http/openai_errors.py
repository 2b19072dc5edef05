"""OpenAI's error shape: ErrorResponse, and how errors of routes, bodies and fields take this shape."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from spool.services.backend.interface import BackendUnavailableError, DeadlineExceededError
from spool.services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError
from spool.services.gateway.errors import ErrorKind, RequestError, invalid, note_error, request_error
from spool.services.gateway.metrics import GatewayMetrics
from spool.services.gateway.options import meant, shown
from spool.services.text.chat_template import ChatTemplateError


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail


_KINDS = {
    ErrorKind.INVALID: (400, "invalid_request_error"),
    ErrorKind.UNAUTHENTICATED: (401, "invalid_request_error"),
    ErrorKind.FORBIDDEN: (403, "invalid_request_error"),
    ErrorKind.NOT_FOUND: (404, "invalid_request_error"),
    ErrorKind.METHOD: (405, "invalid_request_error"),
    ErrorKind.SLOW_BODY: (408, "invalid_request_error"),
    ErrorKind.TOO_LARGE: (413, "invalid_request_error"),
    ErrorKind.HEADERS_TOO_LARGE: (431, "invalid_request_error"),
    ErrorKind.QUEUE_FULL: (429, "rate_limit_error"),
    ErrorKind.KEY_LIMIT: (429, "rate_limit_error"),
    ErrorKind.FAILED: (500, "server_error"),
    ErrorKind.UNAVAILABLE: (503, "server_error"),
    ErrorKind.DEADLINE: (504, "timeout_error"),
}
# Routes of OpenAI's that clients try, and what to use in their place.
_INSTEAD = {
    "/v1/responses": "this server has no Responses API, use /v1/chat/completions",
    "/v1/embeddings": "this server generates text and computes no embeddings, use a server of an embedding model",
}
_OF_STATUS = {404: ErrorKind.NOT_FOUND, 405: ErrorKind.METHOD}
_SHOWN_FAULTS = 3
# Parts of pydantic's and FastAPI's locations that clients do not know.
_NOT_FIELDS = ("body", "header", "path", "query", "[key]")


def error_body(error: RequestError) -> str:
    _, kind = _KINDS[error.kind]
    detail = ErrorDetail(message=error.message, type=kind, param=error.param, code=error.code)
    return ErrorResponse(error=detail).model_dump_json()


def error_response(error: RequestError) -> Response:
    status, _ = _KINDS[error.kind]
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.kind is ErrorKind.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), status, headers, media_type="application/json")


def validation_error(faults: Sequence[Any]) -> RequestError:
    """What is wrong with a request, from pydantic's list of errors."""
    params, messages = [], []
    for fault in faults[:_SHOWN_FAULTS]:
        param, message = _fault(fault)
        params.append(param)
        messages.append(message)
    if len(faults) > _SHOWN_FAULTS:
        messages.append(f"and {len(faults) - _SHOWN_FAULTS} more")
    return invalid("; ".join(messages), params[0], "invalid_value")


def _fault(fault: Any) -> tuple[str | None, str]:
    place = [_printable(str(part)) for part in fault["loc"] if part not in _NOT_FIELDS]
    kind, message = fault["type"], _printable(str(fault["msg"]))
    within = _printable(fault.get("ctx", {}).get("param") or "")
    param = ".".join([*place, *([within] if within else [])]) or None
    if kind == "unknown_field":
        return param, f"{param} {message}{meant(within, fault['ctx']['known'])}"
    if kind == "wrong_form":
        return param, f"{param} {message}" if place else message
    if kind == "string_unicode":
        return param, f"{param or 'the body'} holds half a surrogate pair, which is no character"
    if param is None:
        if kind == "missing":
            return None, "the body is empty, must be a JSON object"
        return None, f"the body must be a JSON object, sent with content-type application/json: {message}"
    if kind == "missing":
        return param, f"{param} is missing"
    if kind == "extra_forbidden":
        return param, f"{param} is not a known field"
    return param, f"{param} is {shown(fault['input'])}, {message.replace('Input should', 'must', 1)}"


def _printable(text: str) -> str:
    return text[:200].encode("utf-8", "backslashreplace").decode()


def install_error_handlers(app: FastAPI, metrics: GatewayMetrics) -> None:
    """Makes every error of a route a response of OpenAI's error shape."""

    def answer(error: RequestError, headers: dict[str, str] | None = None) -> Response:
        metrics.failed(error.kind)
        note_error(error)
        response = error_response(error)
        response.headers.update(headers or {})
        return response

    async def known(request: Request, error: Exception) -> Response:
        return answer(request_error(error))

    async def wrong_body(request: Request, error: Exception) -> Response:
        faults = error.errors() if isinstance(error, RequestValidationError) else []
        return answer(validation_error(faults))

    async def http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        kind = _OF_STATUS.get(status, ErrorKind.INVALID if status < 500 else ErrorKind.FAILED)
        detail = str(getattr(error, "detail", ""))
        if kind in (ErrorKind.NOT_FOUND, ErrorKind.METHOD):
            detail = f"{HTTPStatus(status).phrase}: {_printable(f'{request.method} {request.url.path}')}"
            if request.url.path in _INSTEAD:
                detail = f"{detail}: {_INSTEAD[request.url.path]}"
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        return answer(RequestError(kind, detail), headers)

    for kind in (
        RequestError,
        AdmissionRefusedError,
        BackendUnavailableError,
        DeadlineExceededError,
        SequenceFailedError,
        ChatTemplateError,
    ):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, wrong_body)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, known)
