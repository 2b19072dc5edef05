"""Views of what a scheduler and its workers are doing, a few times a second, for callers of `Watch`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing

import grpc.aio

from protos import cell_view_pb2, cell_view_pb2_grpc, scheduler_pb2
from scheduler.state.sequence_record import SequenceState
from scheduler.statistics import SequenceSnapshot
from services.rpc.worker_codec import ROLES
from services.scheduler.service import SchedulerService
from services.scheduler.telemetry.step_trace import StepTrace, TracedStep

MIN_PERIOD_SECONDS = 0.1
MAX_PERIOD_SECONDS = 60.0
MAX_SEQUENCES = 10_000

_STATES = {
    SequenceState.WAITING: cell_view_pb2.SEQUENCE_STATE_WAITING,
    SequenceState.PREFILLING: cell_view_pb2.SEQUENCE_STATE_PREFILLING,
    SequenceState.READY: cell_view_pb2.SEQUENCE_STATE_READY,
    SequenceState.DRAFTING: cell_view_pb2.SEQUENCE_STATE_DRAFTING,
    SequenceState.DRAFTED: cell_view_pb2.SEQUENCE_STATE_DRAFTED,
    SequenceState.VERIFYING: cell_view_pb2.SEQUENCE_STATE_VERIFYING,
    SequenceState.MOVING: cell_view_pb2.SEQUENCE_STATE_MOVING,
}


class CellViewer(cell_view_pb2_grpc.CellViewerServicer):
    """`status` gives the scheduler's status. Steps are recorded only while somebody watches."""

    def __init__(self, service: SchedulerService, status: Callable[[], scheduler_pb2.StatusReply]) -> None:
        self._service = service
        self._status = status

    async def Watch(  # noqa: N802
        self, request: cell_view_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[cell_view_pb2.CellView]:
        try:
            _check(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        period_seconds, most = request.period_seconds, request.max_sequences
        async with aclosing(views(self._service, self._status, period_seconds, most)) as shown:
            async for view in shown:
                yield view
        await context.abort(grpc.StatusCode.UNAVAILABLE, self._service.closed_because or "")


async def views(
    service: SchedulerService,
    status: Callable[[], scheduler_pb2.StatusReply],
    period_seconds: float,
    max_sequences: int,
) -> AsyncGenerator[cell_view_pb2.CellView, None]:
    """One view each period, until the service is closed."""
    trace = StepTrace()
    with service.observed(trace):
        while service.closed_because is None:
            reply = status()
            yield cell_view_pb2.CellView(
                now=time.monotonic(),
                sequences=_sequences(service.core.sequences(max_sequences)),
                unlisted_sequences=max(reply.live_set.live - max_sequences, 0),
                steps=_steps(trace.take()),
                status=reply,
            )
            await asyncio.sleep(period_seconds)


def _check(request: cell_view_pb2.WatchRequest) -> None:
    period, most = request.period_seconds, request.max_sequences
    if not MIN_PERIOD_SECONDS <= period <= MAX_PERIOD_SECONDS:
        limits = f"between {MIN_PERIOD_SECONDS:g} and {MAX_PERIOD_SECONDS:g}"
        raise ValueError(f"period_seconds is {period:g}, must be {limits}")
    if most > MAX_SEQUENCES:
        raise ValueError(f"max_sequences is {most}, must be at most {MAX_SEQUENCES}")


def _sequences(snapshots: Iterable[SequenceSnapshot]) -> list[cell_view_pb2.SequenceView]:
    return [
        cell_view_pb2.SequenceView(
            sequence_id=snapshot.sequence_id,
            length=snapshot.length,
            prompt_length=snapshot.prompt_length,
            state=_STATES[snapshot.state],
            target_id=snapshot.target_id or "",
        )
        for snapshot in snapshots
    ]


def _steps(steps: Iterable[TracedStep]) -> list[cell_view_pb2.StepView]:
    return [
        cell_view_pb2.StepView(
            worker_id=step.worker_id,
            role=ROLES.to_wire(step.role),
            started=step.started,
            ended=step.replied,
            rows=step.rows,
            draft_length=step.draft_length,
            equal_length=step.equal_length,
        )
        for step in steps
        if step.rows
    ]
