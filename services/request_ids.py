"""The request that the present task works for: its id, the client's own or one of ours, and the trace it belongs to."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from contextvars import ContextVar

REQUEST_ID = "x-request-id"
"""Header of HTTP, metadata of gRPC."""

LONGEST_REQUEST_ID = 128

# Printable, so that it can stand in a header and in a line of a log.
_FORM = re.compile(rf"[\x21-\x7e]{{1,{LONGEST_REQUEST_ID}}}")

TRACEPARENT = "traceparent"
"""The same, of W3C Trace Context."""

_current: ContextVar[str] = ContextVar("request_id", default="")
_traceparent: ContextVar[str] = ContextVar("traceparent", default="")


def current_request_id() -> str:
    """Empty where no request is worked for."""
    return _current.get()


def current_traceparent() -> str:
    """What the client gave; empty where it gave none."""
    return _traceparent.get()


def begin_request(given: str, traceparent: str = "") -> str:
    """From here on, this task and those that it starts work for the request; returns its id.

    One that is `given` in a usable form is kept, else there is a new one.
    """
    request_id = given if _FORM.fullmatch(given) else uuid.uuid4().hex
    _current.set(request_id)
    _traceparent.set(traceparent)
    return request_id


def given_in(metadata: Iterable[tuple[str, str | bytes]] | None, name: str = REQUEST_ID) -> str:
    """What a call's metadata has by that name; empty where there is nothing."""
    found = [value for key, value in metadata or () if key == name and isinstance(value, str)]
    return found[0] if found else ""
