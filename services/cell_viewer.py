"""Shows what a scheduler and its workers are doing, a few times a second, to whoever watches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing

import grpc.aio

from protos import cell_view_pb2, cell_view_pb2_grpc, scheduler_pb2
from scheduler.sequence import SequenceState
from scheduler.statistics import SequenceSnapshot
from services.scheduler_service import SchedulerService
from services.step_trace import StepTrace, TracedStep
from services.wire import role_to_wire

SHORTEST_PERIOD_SECONDS = 0.1
LONGEST_PERIOD_SECONDS = 60.0
MOST_SEQUENCES = 10_000

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
    """`status` is what the scheduler's Status method answers. Nothing is recorded while nobody watches."""

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
        period_seconds, most = request.period_seconds, request.most_sequences
        async with aclosing(views(self._service, self._status, period_seconds, most)) as shown:
            async for view in shown:
                yield view
        await context.abort(grpc.StatusCode.UNAVAILABLE, self._service.closed_because or "")


async def views(
    service: SchedulerService,
    status: Callable[[], scheduler_pb2.StatusReply],
    period_seconds: float,
    most_sequences: int,
) -> AsyncGenerator[cell_view_pb2.CellView, None]:
    """One each period, until the service is closed."""
    trace = StepTrace()
    with service.observed(trace):
        while service.closed_because is None:
            reply = status()
            yield cell_view_pb2.CellView(
                now=time.monotonic(),
                sequences=_sequences(service.core.sequences(most_sequences)),
                unlisted_sequences=max(reply.pool.pool - most_sequences, 0),
                steps=_steps(trace.take()),
                status=reply,
            )
            await asyncio.sleep(period_seconds)


def _check(request: cell_view_pb2.WatchRequest) -> None:
    period, most = request.period_seconds, request.most_sequences
    if not SHORTEST_PERIOD_SECONDS <= period <= LONGEST_PERIOD_SECONDS:
        limits = f"between {SHORTEST_PERIOD_SECONDS:g} and {LONGEST_PERIOD_SECONDS:g}"
        raise ValueError(f"period_seconds is {period:g}, must be {limits}")
    if most > MOST_SEQUENCES:
        raise ValueError(f"most_sequences is {most}, must be at most {MOST_SEQUENCES}")


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
            role=role_to_wire(step.role),
            started=step.started,
            ended=step.replied,
            rows=step.rows,
            draft_length=step.draft_length,
            equal_length=step.equal_length,
        )
        for step in steps
        if step.rows
    ]
