"""The live page under /dashboard: what the cell is doing, as pictures, with nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib import resources
from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from protos import cell_view_pb2, scheduler_pb2, worker_pb2
from services.backend import Backend
from services.gateway.errors import ErrorKind, RequestError
from services.gateway.event_stream import EventStreamResponse, data_event

DASHBOARD_PATH = "/dashboard"

_PERIOD_SECONDS = 0.2
_MOST_SEQUENCES = 1000
_MOST_WATCHERS = 16
_PING_SECONDS = 5.0

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "LICENSE": "text/plain; charset=utf-8",
}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def dashboard_router(backend: Backend) -> APIRouter:
    """The page, its parts, and the views that it draws."""
    router = APIRouter(prefix=DASHBOARD_PATH, include_in_schema=False)
    folder = resources.files("services.gateway") / "dashboard_page"
    parts = {part.name: part.read_bytes() for part in folder.iterdir() if part.is_file()}
    watchers = 0

    async def watched() -> AsyncGenerator[bytes, None]:
        nonlocal watchers
        watchers += 1
        try:
            async with aclosing(backend.watch(_PERIOD_SECONDS, _MOST_SEQUENCES)) as views:
                async for view in views:
                    yield data_event(json.dumps(view_shape(view), separators=(",", ":")))
        finally:
            watchers -= 1

    @router.get("")
    async def page() -> Response:
        return _part(parts, "index.html")

    @router.get("/views")
    async def views() -> Response:
        if watchers >= _MOST_WATCHERS:
            raise RequestError(
                ErrorKind.QUEUE_FULL, f"{watchers} pages watch this gateway, the limit is {_MOST_WATCHERS}"
            )
        # The first view comes before the status line, so that a scheduler that is missing is an error status.
        events = watched()
        first = await anext(events)
        return EventStreamResponse(_continued(first, events), _PING_SECONDS)

    @router.get("/{name}")
    async def part(name: str) -> Response:
        return _part(parts, name)

    return router


async def _continued(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


def _part(parts: dict[str, bytes], name: str) -> Response:
    if name not in parts:
        raise HTTPException(404)
    return Response(parts[name], headers=_HEADERS | {"content-type": _TYPES[name.rpartition(".")[2]]})


def view_shape(view: cell_view_pb2.CellView) -> dict[str, Any]:
    """What the page reads: lists instead of names for what there is a lot of. States count from 0 (waiting)."""
    status = view.status
    return {
        "now": view.now,
        "model": status.model.model_id,
        "sequences": [
            [each.sequence_id, each.length, each.prompt_length, each.state - 1, each.target_id]
            for each in view.sequences
        ],
        "unlisted": view.unlisted_sequences,
        "steps": [
            [
                step.worker_id,
                _role(step.role),
                round(step.started, 4),
                round(step.ended, 4),
                step.rows,
                step.draft_length,
                step.equal_length,
            ]
            for step in view.steps
        ],
        "replicas": status.replicas.explanation,
        "workers": [
            {
                "id": worker.worker_id,
                "role": _role(worker.role),
                "state": scheduler_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower(),
            }
            for worker in status.workers
        ],
    }


def _role(role: worker_pb2.Role) -> str:
    return worker_pb2.Role.Name(role).removeprefix("ROLE_").lower()
