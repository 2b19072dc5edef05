"""Tasks that die: what they served goes on with another one, or says that it is broken; nothing stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from spool.services.backend.interface import BackendUnavailableError
from spool.services.scheduler.workers import worker_link
from spool.services.scheduler_client.remote import SchedulerClient
from tests.support.cells import (
    LINKS,
    Cell,
    all_in_use,
    check,
    client,
    prompt_of,
    read,
    read_some,
    request_of,
    running_cell,
)
from tests.support.stand_in_worker import continuation
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
TOKENS = 200


def tasks() -> dict[str, asyncio.Task[Any]]:
    """Those of services/, by the name of their coroutine; what gRPC starts for each call belongs to gRPC."""
    found = {}
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        if code is not None and Path(code.co_filename).resolve().is_relative_to(ROOT / "services"):
            found[code.co_qualname] = task
    return found


def in_a_cell(test: Callable[[Cell, SchedulerClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with running_cell(step_seconds=0.005) as cell, client(cell.resolve) as backend:
            await check(backend, 0, 10)
            await test(cell, backend)

    asyncio.run(run())


def health(cell: Cell, backend: SchedulerClient) -> None:
    """Raises what any of the processes says of itself."""
    cell.server.check_health()
    backend.check_health()
    for worker in cell.workers:
        worker.registration.check_health()


def healthy(cell: Cell, backend: SchedulerClient) -> bool:
    try:
        health(cell, backend)
    except RuntimeError:
        return False
    return True


def test_a_task_that_dies_is_begun_anew_or_health_tells() -> None:
    names: list[str] = []

    async def look(cell: Cell, backend: SchedulerClient) -> None:
        names.extend(tasks())
        assert healthy(cell, backend)

    in_a_cell(look)
    assert len(names) == 11
    told = 0
    for name in names:

        async def test(cell: Cell, backend: SchedulerClient, name: str = name) -> None:
            nonlocal told
            stream = await backend.submit(request_of(1, TOKENS))
            begun = await read_some(stream, 5)
            dead = tasks()[name]
            dead.cancel()
            rest = asyncio.create_task(read(stream))
            await until(lambda: not healthy(cell, backend) or (rest.done() and tasks().get(name, dead) is not dead))
            if healthy(cell, backend):
                assert begun + await rest == continuation(prompt_of(1), TOKENS)
                await check(backend, 2, 10)
                return
            told += 1
            try:
                backend.check_health()
            except RuntimeError:
                with pytest.raises(BackendUnavailableError, match="broken"):
                    await rest
                with pytest.raises(BackendUnavailableError, match="broken"):
                    await backend.submit(request_of(2, 5))
            rest.cancel()

        in_a_cell(test)
    assert told == 5


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
        monkeypatch.setattr(worker_link, "step_to_wire", fails_once(worker_link.step_to_wire))
        assert begun + await read(stream) == continuation(prompt_of(1), TOKENS)
        assert cell.service.statistics().workers_lost == 1
        await all_in_use(cell.workers)

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


async def test_a_step_may_take_longer_than_a_worker_may_be_silent() -> None:
    seconds = 2.5 * LINKS.silence_timeout
    async with running_cell(drafts=0, step_seconds=seconds) as cell, client(cell.resolve) as backend:
        await check(backend, 1, 2)
        assert cell.service.statistics().workers_lost == 0
