"""The request that the current task works for: its id (the client's own or a new one), its trace and its API key.

asgi-correlation-id is not used: its middleware serves HTTP only, so gRPC calls would still need what stands here.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

REQUEST_ID = "x-request-id"
"""Name of the HTTP header and of the gRPC metadata."""

LONGEST_REQUEST_ID = 128

# Printable characters, which headers and log lines can hold.
_FORM = re.compile(rf"[\x21-\x7e]{{1,{LONGEST_REQUEST_ID}}}")

# Of W3C Trace Context: version, trace, span, flags.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-")

TRACEPARENT = "traceparent"
"""Name of the header and metadata of W3C Trace Context."""


@dataclass(slots=True)
class _Request:
    """Tasks that work for a request share it."""

    request_id: str = ""
    traceparent: str = ""
    began: float | None = None
    figures: dict[str, str] = field(default_factory=dict)


_current: ContextVar[_Request | None] = ContextVar("request", default=None)
_key: ContextVar[str] = ContextVar("key", default="")
_key_digest: ContextVar[bytes] = ContextVar("key_digest", default=b"")


def current_request_id() -> str:
    """Empty outside a request."""
    return _request().request_id


def current_traceparent() -> str:
    """The client's `traceparent`, or the one that was noted since; empty if there is none."""
    return _request().traceparent


def trace_id_of(traceparent: str) -> str:
    """The id of the trace; empty if there is none."""
    found = _TRACEPARENT.match(traceparent)
    return found[1] if found else ""


def note_trace(traceparent: str) -> None:
    """The request is traced from here on as this says; it is not traced if it is empty, and nothing changes."""
    if traceparent:
        _request().traceparent = traceparent


def note_figures(**figures: str | None) -> None:
    """For the line at the request's end; those that are None are left out."""
    _request().figures |= {name: figure for name, figure in figures.items() if figure is not None}


def noted_figures() -> Mapping[str, str]:
    return _request().figures


def request_began() -> float:
    """When the first of the request's bytes were read, by `time.perf_counter`; now, outside a request."""
    began = _request().began
    return time.perf_counter() if began is None else began


def current_key() -> str:
    """The name of the API key that the request showed; empty if there was none, or one without a name."""
    return _key.get()


def current_account() -> str:
    """Whose part of a cell the request takes: the key's name or, of a key without one, a part of its digest, which no
    name can be. Empty if there was no key."""
    digest = _key_digest.get()
    return _key.get() or (f"#{digest[:8].hex()}" if digest else "")


def current_key_digest() -> bytes:
    """Of the API key that the request showed; empty if there was none."""
    return _key_digest.get()


def note_key(name: str, digest: bytes) -> None:
    """Marks this task, and the tasks that this task starts, as working for a request that showed this key."""
    _key.set(name)
    _key_digest.set(digest)


def begin_request(given: str, traceparent: str = "") -> str:
    """Marks this task, and the tasks that this task starts, as working for a request; returns the request's id.

    The id is `given` if `given` has a usable form, and a new one otherwise.
    """
    request_id = given if _FORM.fullmatch(given) else uuid.uuid4().hex
    _current.set(_Request(request_id, traceparent, time.perf_counter()))
    return request_id


def _request() -> _Request:
    """A new one outside a request."""
    return _current.get() or _Request()


def given_in(metadata: Iterable[tuple[str, str | bytes]] | None, name: str = REQUEST_ID) -> str:
    """The text under `name` in a call's metadata; empty if there is none."""
    found = [value for key, value in metadata or () if key == name and isinstance(value, str)]
    return found[0] if found else ""
