"""Views of what a scheduler and its workers are doing, a few times a second, for callers of `Watch`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import grpc.aio

from spool.protos import cell_view_pb2, cell_view_pb2_grpc, scheduler_pb2
from spool.scheduler.messages import SendStep, SequenceState, StepCompleted
from spool.scheduler.statistics import SequenceSnapshot
from spool.services.observability.observer import ServiceObserver, StepTimings
from spool.services.rpc.conversion import WireEnum, to_wire
from spool.services.scheduler.service import SchedulerService

MIN_PERIOD_SECONDS = 0.1
MAX_PERIOD_SECONDS = 60.0
MAX_SEQUENCES = 10_000

_STATES = WireEnum(SequenceState, cell_view_pb2.SequenceState, "SEQUENCE_STATE_")


class StepViews(ServiceObserver):
    """Collects views of answered steps, until they are taken. A worker's clock never leaves it: a step is taken to end
    when its reply came, so it is late by the way of the reply."""

    def __init__(self) -> None:
        self._steps: list[cell_view_pb2.StepView] = []

    def take(self) -> list[cell_view_pb2.StepView]:
        """Those answered since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def step_replied(self, step: SendStep, answer: StepCompleted, timings: StepTimings, now: float) -> None:
        if not step.rows:
            return
        # Rows that verify feed one token, chunks of prefill nearly always more.
        answers = zip(step.rows, answer.results, strict=True)
        lengths = [(row.end, result.verified) for row, result in answers if row.sample and len(row.tokens) < 2]
        self._steps.append(
            cell_view_pb2.StepView(
                worker_id=step.worker_id,
                started=now - timings.total,
                ended=now,
                rows=len(step.rows),
                draft_length=max(result.verified for result in answer.results),
                equal_length=len(lengths) > 1 and len(set(lengths)) == 1,
            )
        )


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
    steps = StepViews()
    with service.observed(steps):
        while service.closed_because is None:
            reply = status()
            yield cell_view_pb2.CellView(
                now=time.monotonic(),
                sequences=[_sequence(one) for one in service.core.sequences(max_sequences)],
                unlisted_sequences=max(reply.live_set.live - max_sequences, 0),
                steps=steps.take(),
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


def _sequence(snapshot: SequenceSnapshot) -> cell_view_pb2.SequenceView:
    return to_wire(cell_view_pb2.SequenceView, snapshot, state=_STATES.to_wire(snapshot.state))
