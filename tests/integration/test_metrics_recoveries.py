"""What is lost is counted: workers with the sequences at home there, schedulers, and gateways that fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator

import grpc
import grpc.aio
import pytest

from protos import scheduler_pb2, scheduler_pb2_grpc
from scheduler.messages import Role
from services.counter_figures import counter_figures
from services.gateway_session import SessionOptions
from services.scheduler_client import SchedulerClient
from services.scheduler_service import SchedulerService
from tests.stand_in_worker import continuation
from tests.support.cells import CLIENT, Cell, prompt_of, read, request_of, running_cell, running_scheduler
from tests.support.waiting import LONG, until
from tests.support.watched_engine import Gate, WatchedEngine

COUNT = 9


class Listener:
    """Implements services.scheduler_client.RecoveryListener."""

    def __init__(self) -> None:
        self.opened = 0
        self.breaks = 0
        self.sequences = 0

    def session_opened(self) -> None:
        self.opened += 1

    def session_broke(self) -> None:
        self.breaks += 1

    def resubmitted(self, sequences: int) -> None:
        self.sequences += sequences


async def replies(call: AsyncIterable[scheduler_pb2.SessionReply]) -> list[scheduler_pb2.SessionReply]:
    return [reply async for reply in call]


def hold(cell: Cell) -> list[Gate]:
    """Nothing goes on at targets until the gates are opened."""
    watched = []
    for worker in cell.workers:
        if worker.worker_id.startswith("target"):
            watched.append(WatchedEngine())
            watched[-1].watch(worker.executor)
            watched[-1].gate.close()
    return [one.gate for one in watched]


def recoveries(service: SchedulerService) -> dict[str, int]:
    return {one.label: one.count for one in counter_figures(service).recoveries if one.count}


def at_home(service: SchedulerService, worker_id: str) -> int:
    (worker,) = [one for one in service.core.snapshot().workers if one.worker_id == worker_id]
    return worker.sequences


@pytest.mark.parametrize("role", Role)
def test_sequences_of_a_lost_worker_are_counted_once(role: Role) -> None:
    async def run() -> None:
        async with (
            running_cell(drafts=2, targets=2) as cell,
            SchedulerClient(cell.resolve, options=CLIENT) as backend,
        ):
            gates = hold(cell)
            streams = [await backend.submit(request_of(index, 20)) for index in range(COUNT)]
            lost = f"{role.value}-0"
            sequences = at_home(cell.service, lost)
            assert sequences >= 2
            removal = asyncio.create_task(cell.service.remove_worker(lost))
            await until(lambda: lost not in cell.service.workers_up)
            for gate in gates:
                gate.open()
            await removal
            outputs = [await read(stream) for stream in streams]
            assert outputs == [continuation(prompt_of(index), 20) for index in range(COUNT)]
            assert recoveries(cell.service) == {f"{role.value}_lost": sequences}
            lost_by_role = {one.role: one.workers_lost for one in counter_figures(cell.service).roles}
            assert sorted(lost_by_role.values()) == [0, 1]

    asyncio.run(run())


def test_sequences_that_go_on_at_another_scheduler_are_counted() -> None:
    async def run() -> None:
        listener = Listener()
        async with (
            running_cell() as cell,
            SchedulerClient(cell.resolve, options=CLIENT, listener=listener) as backend,
        ):
            await until(lambda: backend.connected)
            (gate,) = hold(cell)
            streams = [await backend.submit(request_of(index, 20)) for index in range(COUNT)]
            async with running_scheduler(cell.resolve) as (successor, _):
                await until(lambda: successor.core.snapshot().pool == COUNT)
                assert (listener.opened, listener.breaks, listener.sequences) == (2, 1, COUNT)
                gate.open()
                outputs = [await read(stream) for stream in streams]
                assert outputs == [continuation(prompt_of(index), 20) for index in range(COUNT)]
                ended = {one.label: one.count for one in counter_figures(successor).sequences if one.count}
                assert ended == {"length": COUNT}
                assert sum(counter_figures(successor).queue_seconds.counts) == COUNT

    asyncio.run(run())


def test_a_gateway_that_falls_silent_is_counted() -> None:
    async def silence() -> AsyncIterator[scheduler_pb2.SessionRequest]:
        yield scheduler_pb2.SessionRequest(opening=scheduler_pb2.SessionOpening(gateway_id="silent"))
        await asyncio.Event().wait()

    async def run() -> None:
        sessions = SessionOptions(lease_seconds=0.2)
        async with running_cell(sessions=sessions) as cell, grpc.aio.insecure_channel(cell.resolve.address) as channel:
            call = scheduler_pb2_grpc.SchedulerStub(channel).Session(silence())
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await asyncio.wait_for(replies(call), LONG)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            assert counter_figures(cell.service).lease_expiries == 1
            assert cell.server.status().counters.lease_expiries == 1

    asyncio.run(run())
