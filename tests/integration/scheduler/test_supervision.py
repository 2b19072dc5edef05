"""Tasks that die: what they served goes on with another one, or says that it is broken; nothing stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from protos import scheduler_pb2, worker_pb2
from scheduler.messages import SendStep
from services.backend.interface import BackendUnavailableError
from services.scheduler.workers import worker_link
from services.scheduler_client.remote import SchedulerClient
from services.scheduler_client.session import ClientSession
from tests.support.cells import Cell, all_in_use, check, client, prompt_of, read, read_some, request_of, running_cell
from tests.support.stand_in_worker import continuation
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
TOKENS = 200

# Each task of a cell that runs as long as what it serves, and whose health says so when it has died.
HEALTH: dict[str, Callable[[Cell, SchedulerClient], None]] = {
    "WorkerLink.run": lambda cell, backend: cell.server.check_health(),
    "SchedulerServer._await_close": lambda cell, backend: cell.server.check_health(),
    "SchedulerServer._sweep": lambda cell, backend: cell.server.check_health(),
    "CellLink._keep_connected": lambda cell, backend: backend.check_health(),
    "WorkerRegistration._keep_registered": lambda cell, backend: [w.registration.check_health() for w in cell.workers],  # type: ignore[dict-item]
}
# Those whose owner waits for their end, and begins anew.
ANEW = ("ClientSession.run", "GatewaySession._read", "GatewaySession._write", "StepStreams._read")


def tasks() -> dict[str, asyncio.Task[Any]]:
    """Those of services/, by the name of their coroutine; what gRPC starts for each call belongs to gRPC."""
    found = {}
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        if code is not None and Path(code.co_filename).is_relative_to(ROOT / "services"):
            found[code.co_qualname] = task
    return found


def in_a_cell(test: Callable[[Cell, SchedulerClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with running_cell(step_seconds=0.005) as cell, client(cell.resolve) as backend:
            await check(backend, 0, 10)
            await test(cell, backend)

    asyncio.run(run())


def healthy(cell: Cell, backend: SchedulerClient) -> bool:
    try:
        for health in HEALTH.values():
            health(cell, backend)
    except Exception:
        return False
    return True


def test_every_task_of_a_cell_is_known() -> None:
    async def test(cell: Cell, backend: SchedulerClient) -> None:
        await until(lambda: tasks().keys() == {*HEALTH, *ANEW})
        assert healthy(cell, backend)

    in_a_cell(test)


@pytest.mark.parametrize("name", ANEW)
def test_a_task_that_dies_is_begun_anew(name: str) -> None:
    async def test(cell: Cell, backend: SchedulerClient) -> None:
        stream = await backend.submit(request_of(1, TOKENS))
        begun = await read_some(stream, 5)
        tasks()[name].cancel()
        assert begun + await read(stream) == continuation(prompt_of(1), TOKENS)
        await until(lambda: tasks().keys() == {*HEALTH, *ANEW})
        await check(backend, 2, 10)
        assert healthy(cell, backend)

    in_a_cell(test)


@pytest.mark.parametrize("name", HEALTH)
def test_health_tells_of_a_task_that_has_died(name: str) -> None:
    async def test(cell: Cell, backend: SchedulerClient) -> None:
        stream = await backend.submit(request_of(1, TOKENS))
        await read_some(stream, 5)
        tasks()[name].cancel()
        await until(lambda: not healthy(cell, backend))
        with pytest.raises(RuntimeError):
            HEALTH[name](cell, backend)
        stream.cancel()

    in_a_cell(test)


def test_without_its_connection_a_gateway_refuses() -> None:
    async def test(cell: Cell, backend: SchedulerClient) -> None:
        stream = await backend.submit(request_of(1, TOKENS))
        tasks()["CellLink._keep_connected"].cancel()
        with pytest.raises(BackendUnavailableError, match="broken"):
            await read(stream)
        with pytest.raises(BackendUnavailableError, match="broken"):
            await backend.submit(request_of(2, 5))

    in_a_cell(test)


def fails_once(function: Callable[..., Any]) -> Callable[..., Any]:
    failures = iter([ValueError("value out of range: 5000000000")])

    def failing(*arguments: Any) -> Any:
        for failure in failures:
            raise failure
        return function(*arguments)

    return failing


def test_a_step_that_cannot_be_sent_costs_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cell: Cell, backend: SchedulerClient) -> None:
        stream = await backend.submit(request_of(1, TOKENS))
        begun = await read_some(stream, 5)
        plainly: Callable[[SendStep, int, int], worker_pb2.StepRequest] = worker_link.step_to_wire
        monkeypatch.setattr(worker_link, "step_to_wire", fails_once(plainly))
        assert begun + await read(stream) == continuation(prompt_of(1), TOKENS)
        assert cell.service.statistics().workers_lost == 1
        await all_in_use(cell.workers)

    in_a_cell(test)


def test_a_request_that_cannot_be_sent_costs_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cell: Cell, backend: SchedulerClient) -> None:
        stream = await backend.submit(request_of(1, TOKENS))
        begun = await read_some(stream, 5)
        plainly: Callable[[ClientSession], scheduler_pb2.SessionRequest] = ClientSession._next_request
        monkeypatch.setattr(ClientSession, "_next_request", fails_once(plainly))
        await check(backend, 2, 10)
        assert begun + await read(stream) == continuation(prompt_of(1), TOKENS)

    in_a_cell(test)


def test_a_removal_that_is_cancelled_leaves_no_ghost() -> None:
    async def test(cell: Cell, backend: SchedulerClient) -> None:
        removal = asyncio.create_task(cell.service.workers.remove("target-0"))
        await asyncio.sleep(0)
        removal.cancel()
        await asyncio.wait([removal])
        assert removal.cancelled()
        assert cell.service.workers.up == {"draft-0"}
        assert [worker.worker_id for worker in cell.service.core.snapshot().workers] == ["draft-0"]

    in_a_cell(test)
