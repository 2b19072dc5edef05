"""Workers that come, leave, die, come back changed, or do not fit."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from protos import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from scheduler.messages import Role
from services.scheduler.workers.worker_set import RegistryOptions
from tests.support.cells import (
    Cell,
    all_in_use,
    check,
    client,
    prompt_of,
    read,
    request_of,
    running_cell,
    running_worker,
)
from tests.support.stand_in_worker import continuation
from tests.support.waiting import LONG, until

pytestmark = pytest.mark.slow


def states(cell: Cell) -> dict[str, tuple[int, str]]:
    return {worker.worker_id: (worker.state, worker.reason) for worker in cell.server.status().workers}


def test_worker_that_leaves_hands_its_sequences_over() -> None:
    async def run() -> None:
        # One that has left is to be seen for a while.
        registry = RegistryOptions(retry_seconds=0.2, forget_seconds=3, answer_seconds=0.5)
        async with (
            running_cell(targets=2, registry=registry, step_seconds=0.01) as cell,
            client(cell.resolve) as backend,
        ):
            streams = [await backend.submit(request_of(index, 200)) for index in range(12)]
            begun = [list((await anext(stream)).tokens) for stream in streams]
            leaving = cell.workers[1]
            assert leaving.executor.sequences > 0
            goes = asyncio.create_task(leaving.registration.leave(LONG))
            gone = (scheduler_pb2.WORKER_STATE_LEAVING, "it asked to be removed")
            await until(lambda: states(cell)["target-0"] == gone)
            assert await goes == 0
            assert leaving.executor.sequences == leaving.pages_in_use == 0
            assert not leaving.registration.in_use
            assert cell.service.workers.up == {"draft-0", "target-1"}
            for index, stream in enumerate(streams):
                rest = await asyncio.wait_for(read(stream), LONG)
                assert begun[index] + rest == continuation(prompt_of(index), 200)
            await until(lambda: "target-0" not in states(cell))

    asyncio.run(run())


def test_worker_that_is_gone_is_forgotten_and_another_takes_its_name() -> None:
    async def run() -> None:
        async with running_cell(drafts=0, targets=0) as cell, client(cell.resolve) as backend:
            async with running_worker("target-0", Role.TARGET, cell.resolve) as first:
                await all_in_use([first])
                await check(backend, 1, 10)
            await until(lambda: not cell.service.workers.up)
            async with running_worker("target-0", Role.TARGET, cell.resolve, pages=50) as second:
                await all_in_use([second])
                (status,) = cell.server.status().workers
                assert (status.address, status.total_pages) == (second.address, 50)
                await check(backend, 1, 10)
                cell.service.core.check_integrity()
            await until(lambda: not cell.server.status().workers and not cell.service.workers.links)

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
            await cell.workers[0].registration.leave(LONG)
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
            taken, refused = (one, other) if one.registration.in_use else (other, one)
            # The other has had its answer too, and is taken as soon as nothing stands against it.
            await until(lambda: "differ: model_id" in refused.registration.reason)
            assert cell.service.workers.up == {taken.worker_id}
            assert not refused.registration.in_use
            await taken.registration.leave(LONG)
            await all_in_use([refused])
            assert cell.service.workers.up == {refused.worker_id}

    asyncio.run(run())


def test_unreachable_worker_is_reported() -> None:
    async def run() -> None:
        # Nobody is forgotten between two of its calls, however long these take.
        registry = RegistryOptions(retry_seconds=0.2, forget_seconds=LONG, answer_seconds=0.5)
        async with (
            running_cell(drafts=0, registry=registry) as cell,
            grpc.aio.insecure_channel(cell.resolve.address) as channel,
        ):
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            description = worker_pb2.WorkerDescription(role=worker_pb2.ROLE_DRAFT, worker_epoch=1)
            request = scheduler_pb2.RegisterRequest(worker_id="ghost", address="127.0.0.1:1", description=description)
            reply = await stub.Register(request, timeout=LONG)
            assert reply.state == scheduler_pb2.WORKER_STATE_CONNECTING
            async with asyncio.timeout(LONG):
                while reply.state != scheduler_pb2.WORKER_STATE_UNREACHABLE:
                    assert reply.state == scheduler_pb2.WORKER_STATE_CONNECTING
                    reply = await stub.Register(request, timeout=LONG)
            assert "worker ghost at 127.0.0.1:1 does not answer" in states(cell)["ghost"][1]
            while_tried_again = await stub.Register(request, timeout=LONG)
            assert while_tried_again.state == scheduler_pb2.WORKER_STATE_UNREACHABLE
            assert reply.scheduler_epoch <= cell.service.workers.epoch
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
                    await stub.Register(wrong, timeout=LONG)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert message in (caught.value.details() or "")

    asyncio.run(run())
