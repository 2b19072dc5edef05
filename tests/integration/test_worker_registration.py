"""Workers that come, leave, die, come back changed, or do not fit."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from scheduler.messages import Role
from tests.stand_in_worker import continuation
from tests.support.cells import (
    Cell,
    Whereabouts,
    all_in_use,
    check,
    client,
    prompt_of,
    read,
    request_of,
    running_cell,
    running_scheduler,
    running_worker,
)


async def until(condition: Any, seconds: float = 10) -> None:
    """For what no event announces."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def states(cell: Cell) -> dict[str, tuple[int, str]]:
    return {worker.worker_id: (worker.state, worker.reason) for worker in cell.server.status().workers}


def test_worker_that_leaves_hands_its_sequences_over() -> None:
    async def run() -> None:
        async with running_cell(targets=2, step_seconds=0.01) as cell, client(cell.resolve) as backend:
            streams = [await backend.submit(request_of(index, 80)) for index in range(12)]
            for stream in streams:
                await anext(stream)
            leaving = cell.workers[1]
            assert leaving.executor.sequences > 0
            assert await leaving.registration.leave(5) == 0
            assert leaving.executor.sequences == leaving.pages_in_use == 0
            assert not leaving.registration.in_use
            assert cell.service.workers_up == {"draft-0", "target-1"}
            assert states(cell)["target-0"] == (scheduler_pb2.WORKER_STATE_LEAVING, "it asked to be removed")
            for index, stream in enumerate(streams):
                rest = await asyncio.wait_for(read(stream), 30)
                assert rest == continuation(prompt_of(index), 80)[-len(rest) :]
            await until(lambda: "target-0" not in states(cell), 5)

    asyncio.run(run())


def test_leaving_takes_no_longer_than_it_may() -> None:
    async def run() -> None:
        resolve = Whereabouts()
        async with AsyncExitStack() as stack:
            async with running_scheduler(resolve):
                worker = await stack.enter_async_context(running_worker("target-0", Role.TARGET, resolve))
                await all_in_use([worker])
            loop = asyncio.get_running_loop()
            began = loop.time()
            assert await worker.registration.leave(1) == 0
            assert loop.time() - began < 1.5

    asyncio.run(run())


def test_worker_that_is_gone_is_forgotten_and_another_takes_its_name() -> None:
    async def run() -> None:
        async with running_cell(drafts=0, targets=0) as cell, client(cell.resolve) as backend:
            async with running_worker("target-0", Role.TARGET, cell.resolve) as first:
                await all_in_use([first])
                await check(backend, 1, 10)
            await until(lambda: not cell.service.workers_up)
            async with running_worker("target-0", Role.TARGET, cell.resolve, pages=50) as second:
                await all_in_use([second])
                (status,) = cell.server.status().workers
                assert (status.address, status.total_pages) == (second.address, 50)
                await check(backend, 1, 10)
                cell.service.core.check_integrity()
            await until(lambda: not cell.server.status().workers, 5)
            assert not cell.service.workers.endpoints

    asyncio.run(run())


def test_worker_that_does_not_fit_is_told_why_and_taken_when_it_fits() -> None:
    async def run() -> None:
        async with (
            running_cell(drafts=0) as cell,
            running_worker("other", Role.TARGET, cell.resolve, model_id="another") as misfit,
        ):
            await until(lambda: "model_id another and stand-in" in misfit.registration.reason)
            assert not misfit.registration.in_use
            state, reason = states(cell)["other"]
            assert state == scheduler_pb2.WORKER_STATE_REFUSED
            assert "model_id another and stand-in" in reason
            await cell.workers[0].registration.leave(2)
            await all_in_use([misfit])
            assert cell.server.status().model.model_id == "another"

    asyncio.run(run())


def test_two_workers_that_do_not_fit_and_come_at_once_are_not_both_taken() -> None:
    async def run() -> None:
        async with (
            running_cell(drafts=0, targets=0) as cell,
            running_worker("one", Role.TARGET, cell.resolve, model_id="one") as one,
            running_worker("other", Role.TARGET, cell.resolve, model_id="other") as other,
        ):
            await until(lambda: one.registration.in_use or other.registration.in_use)
            for _ in range(20):
                await asyncio.sleep(0.05)
                assert len(cell.service.workers_up) == 1

    asyncio.run(run())


def test_unreachable_worker_is_reported() -> None:
    async def run() -> None:
        async with running_cell(drafts=0) as cell, grpc.aio.insecure_channel(cell.resolve.address) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            description = worker_pb2.WorkerDescription(role=worker_pb2.ROLE_DRAFT, worker_epoch=1)
            request = scheduler_pb2.RegisterRequest(worker_id="ghost", address="127.0.0.1:1", description=description)
            reply = await stub.Register(request, timeout=5)
            assert reply.state == scheduler_pb2.WORKER_STATE_CONNECTING
            async with asyncio.timeout(20):
                while reply.state != scheduler_pb2.WORKER_STATE_UNREACHABLE:
                    assert reply.state == scheduler_pb2.WORKER_STATE_CONNECTING
                    reply = await stub.Register(request, timeout=5)
            assert "worker ghost at 127.0.0.1:1 does not answer" in states(cell)["ghost"][1]
            while_tried_again = await stub.Register(request, timeout=5)
            assert while_tried_again.state == scheduler_pb2.WORKER_STATE_UNREACHABLE
            assert reply.scheduler_epoch <= cell.service.epoch
            for changes, message in (
                ({"worker_id": ""}, "worker_id is empty"),
                ({"address": "nowhere"}, "address is 'nowhere', must be host:port"),
                ({"description": worker_pb2.WorkerDescription()}, "role is 0"),
            ):
                wrong = scheduler_pb2.RegisterRequest()
                wrong.CopyFrom(request)
                for name, value in changes.items():
                    if name == "description":
                        wrong.description.CopyFrom(value)
                    else:
                        setattr(wrong, name, value)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Register(wrong, timeout=5)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert message in (caught.value.details() or "")

    asyncio.run(run())
