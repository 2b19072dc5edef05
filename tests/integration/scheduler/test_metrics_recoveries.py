"""What is lost is counted: workers with the sequences at home there, schedulers, and gateways that fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from spool.protos import scheduler_pb2, scheduler_pb2_grpc
from spool.scheduler.messages import Role
from spool.services.rpc.protocol_version import SPOKEN
from spool.services.scheduler.server import SchedulerServer
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler.session import SessionOptions
from tests.support.cells import Cell, Heard, client, prompt_of, read, request_of, running_cell, running_scheduler
from tests.support.stand_in_worker import continuation
from tests.support.waiting import until
from tests.support.watched_engine import Gate, WatchedEngine

COUNT = 9


def hold(cell: Cell) -> list[Gate]:
    """Nothing goes on at targets until the gates are opened."""
    watched = []
    for worker in cell.workers:
        if worker.worker_id.startswith("target"):
            watched.append(WatchedEngine())
            watched[-1].watch(worker.executor)
            watched[-1].gate.close()
    return [one.gate for one in watched]


def told(server: SchedulerServer, name: str) -> dict[str, float]:
    """By the value of the one label; zeros left out."""
    samples = [sample for family in server.metric_families() for sample in family.samples]
    found = [sample for sample in samples if sample.name == f"spool_{name}"]
    assert found, name
    return {next(iter(sample.labels.values()), ""): sample.value for sample in found if sample.value}


def at_home(service: SchedulerService, worker_id: str) -> int:
    (worker,) = [one for one in service.core.snapshot().workers if one.worker_id == worker_id]
    return worker.sequences


@pytest.mark.parametrize("role", Role)
async def test_sequences_of_a_lost_worker_are_counted_once(role: Role) -> None:
    async with running_cell(drafts=2, targets=2) as cell, client(cell.resolve) as backend:
        gates = hold(cell)
        streams = [await backend.submit(request_of(index, 20)) for index in range(COUNT)]
        lost = f"{role.value}-0"
        sequences = at_home(cell.service, lost)
        assert sequences >= 2
        removal = asyncio.create_task(cell.service.remove_worker(lost))
        # Not until it is down: it registers again, and may be up at once.
        await until(lambda: told(cell.server, "workers_lost_total") == {role.value: 1})
        for gate in gates:
            gate.open()
        await removal
        outputs = [await read(stream) for stream in streams]
        assert outputs == [continuation(prompt_of(index), 20) for index in range(COUNT)]
        assert told(cell.server, "recoveries_total") == {f"{role.value}_lost": sequences}
        assert told(cell.server, "workers_lost_total") == {role.value: 1}


async def test_sequences_that_go_on_at_another_scheduler_are_counted() -> None:
    heard = Heard()
    async with running_cell() as cell, client(cell.resolve, listener=heard) as backend:
        await until(lambda: backend.connected)
        (gate,) = hold(cell)
        streams = [await backend.submit(request_of(index, 20)) for index in range(COUNT)]
        async with running_scheduler(cell.resolve) as (successor, server):
            await until(lambda: successor.core.snapshot().live == COUNT)
            assert (heard.opened, heard.broken, heard.moved) == (2, 1, COUNT)
            gate.open()
            outputs = [await read(stream) for stream in streams]
            assert outputs == [continuation(prompt_of(index), 20) for index in range(COUNT)]
            assert told(server, "sequences_total") == {"length": COUNT}
            assert told(server, "request_queue_time_seconds_count") == {"": COUNT}


async def test_a_gateway_that_falls_silent_is_counted() -> None:
    async def silence() -> AsyncIterator[scheduler_pb2.SessionRequest]:
        yield scheduler_pb2.SessionRequest(
            opening=scheduler_pb2.SessionOpening(gateway_id="silent", protocol_version=SPOKEN.newest)
        )
        await asyncio.Event().wait()

    sessions = SessionOptions(lease_seconds=0.2)
    async with running_cell(sessions=sessions) as cell, grpc.aio.insecure_channel(cell.resolve.address) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).Session(silence())
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in call:
                pass
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert told(cell.server, "lease_expiries_total") == {"": 1}
