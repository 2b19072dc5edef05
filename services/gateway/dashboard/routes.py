"""The live page under /dashboard: pictures of what the cell is doing, without anything from other servers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from importlib import resources
from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from spool.engine.models.source import public_name
from spool.protos import cell_view_pb2, scheduler_pb2, worker_pb2
from spool.services.gateway.errors import ErrorKind, RequestError
from spool.services.gateway.http.event_stream import event_stream
from spool.services.observability.request_ids import current_account
from spool.services.scheduler_client.remote import SchedulerClient, workers_in_use

DASHBOARD_PATH = "/dashboard"

_PERIOD_SECONDS = 0.2
_MAX_SEQUENCES = 1000
_MAX_WATCHERS = 16
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


def dashboard_router(backend: SchedulerClient) -> APIRouter:
    """The page, the files that the page loads, and the views that the page draws."""
    router = APIRouter(prefix=DASHBOARD_PATH, include_in_schema=False)
    folder = resources.files("spool.services.gateway.dashboard") / "page"
    parts = {part.name: part.read_bytes() for part in folder.iterdir() if part.is_file()}
    watchers = Counter[str]()

    async def watched(cell: int, key: str) -> AsyncGenerator[str, None]:
        watchers[key] += 1
        try:
            async with aclosing(backend.watch(_PERIOD_SECONDS, _MAX_SEQUENCES, cell)) as views:
                async for view in views:
                    yield json.dumps(view_shape(view), separators=(",", ":"))
        finally:
            watchers[key] -= 1
            if not watchers[key]:
                del watchers[key]

    @router.get("")
    async def page() -> Response:
        return _part(parts, "index.html")

    @router.get("/views")
    async def views(cell: int = 1) -> Response:
        if not 1 <= cell <= backend.cells:
            raise RequestError(ErrorKind.NOT_FOUND, f"cell is {cell}, must be between 1 and {backend.cells}")
        key, total = current_account(), watchers.total()
        # A key takes at most as many places as it leaves free for others.
        if watchers[key] >= _MAX_WATCHERS - total:
            raise RequestError(
                ErrorKind.QUEUE_FULL,
                f"{total} pages are watching this gateway, {watchers[key]} of them with this key; the limit is "
                f"{_MAX_WATCHERS}, and for one key as many as are free",
            )
        # Waiting for the first view before the status line makes a missing scheduler an error status.
        events = watched(cell, key)
        first = await anext(events)
        return event_stream(_continued(first, events), _PING_SECONDS)

    @router.get("/{name}")
    async def part(name: str) -> Response:
        return _part(parts, name)

    return router


async def _continued(first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


def _part(parts: dict[str, bytes], name: str) -> Response:
    if name not in parts:
        raise HTTPException(404)
    return Response(parts[name], headers=_HEADERS | {"content-type": _TYPES[name.rpartition(".")[2]]})


def view_shape(view: cell_view_pb2.CellView) -> dict[str, Any]:
    """A view as the page reads it. Sequences and steps are lists without field names, because there are many of them.

    States count from 0 (waiting).
    """
    status = view.status
    return {
        "now": view.now,
        "model": public_name(status.model.model_id),
        "quantization": status.model.quantization,
        "sequences": [
            [each.sequence_id, each.length, each.prompt_length, each.state - 1, each.target_id]
            for each in view.sequences
        ],
        "unlisted": view.unlisted_sequences,
        "steps": [
            [
                step.worker_id,
                round(step.started, 4),
                round(step.ended, 4),
                step.rows,
                step.draft_length,
                step.equal_length,
            ]
            for step in view.steps
        ],
        "figures": {
            "running": status.live_set.running,
            "waiting": status.live_set.waiting,
            "kv_usage": _kv_usage(status),
            "drafts": status.speculation.drafts,
            "draft_tokens": status.speculation.draft_tokens,
            "accepted_tokens": status.speculation.accepted_tokens,
            "accepted_per_position": list(status.speculation.accepted_per_position),
        },
        "replicas": status.replicas.explanation,
        "drafting": [
            *(choice.explanation for choice in status.drafting),
            *_by_source(status.speculation),
            *_ahead(status.speculation),
        ],
        "workers": [
            {
                "id": worker.worker_id,
                "role": _role(worker.role),
                "state": scheduler_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower(),
                "busy": round(worker.busy_share, 3),
                "version": worker.version or "-",
            }
            for worker in status.workers
        ],
        "gateways": [{"id": gateway.gateway_id, "version": gateway.version or "-"} for gateway in status.gateways],
    }


def _by_source(figures: scheduler_pb2.SpeculationFigures) -> Iterator[str]:
    """How much was accepted of each who proposed, where that is more than one."""
    sources = [
        f"{worker_pb2.ProposalSource.Name(one.source).removeprefix('PROPOSAL_SOURCE_').lower()} "
        f"{one.accepted_tokens / one.draft_tokens:.0%}"
        for one in figures.sources
    ]
    if len(sources) > 1:
        yield f"accepted by source: {', '.join(sources)}"


def _ahead(figures: scheduler_pb2.SpeculationFigures) -> Iterator[str]:
    """What draft workers that go ahead of verdicts have brought."""
    if figures.proposals_ahead:
        share = figures.proposals_ahead / figures.proposals_asked
        yield f"{share:.0%} of proposals were there before they were asked for: hid {figures.hidden_seconds:.1f} s"


def _kv_usage(status: scheduler_pb2.StatusReply) -> float:
    """KV pages in use of all workers in use, 1 for all of them."""
    workers = workers_in_use([status])
    total = sum(worker.total_pages for worker in workers)
    return sum(worker.total_pages - worker.free_pages for worker in workers) / max(total, 1)


def _role(role: worker_pb2.Role) -> str:
    return worker_pb2.Role.Name(role).removeprefix("ROLE_").lower()
