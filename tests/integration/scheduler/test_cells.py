"""Several cells behind one gateway: each text is that of one cell, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.key_class import KeyClass
from spool.scheduler.messages import RefusalCause
from spool.services.backend.interface import GenerationRequest
from spool.services.backend.sequence_stream import AdmissionRefusedError
from spool.services.scheduler_client.cell_choice import PAGE_TOKENS
from spool.services.scheduler_client.remote import SchedulerClient
from tests.support.cells import Cell, Heard, client, prompt_of, read, read_some, request_of, running_cell
from tests.support.stand_in_worker import continuation
from tests.support.waiting import LONG, until

pytestmark = pytest.mark.slow
STEP = 0.005


@asynccontextmanager
async def gateway(cells: Sequence[Cell], listener: Heard | None = None) -> AsyncIterator[SchedulerClient]:
    """Once it has a session with each cell, and knows of its targets."""
    heard = listener or Heard()
    async with client(*(cell.resolve for cell in cells), listener=heard) as backend:
        await until(lambda: heard.opened == len(cells))
        yield backend


@asynccontextmanager
async def two_cells(
    config: SchedulerConfig | None = None, targets: int = 1, step_seconds: float = STEP
) -> AsyncIterator[list[Cell]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(running_cell(targets=targets, config=config, step_seconds=step_seconds))
            for _ in range(2)
        ]


async def test_sequences_leave_a_cell_that_has_lost_its_targets() -> None:
    heard = Heard()
    async with two_cells() as cells, gateway(cells, heard) as backend:
        streams = [await backend.submit(request_of(index, 200)) for index in range(20)]
        begun = [await read_some(stream, 5) for stream in streams]
        # It says goodbye as a replica does that is to go.
        target = next(worker for worker in cells[0].workers if worker.worker_id == "target-0")
        left = asyncio.create_task(target.registration.leave(LONG))
        async with asyncio.timeout(2 * LONG):
            for index, stream in enumerate(streams):
                assert begun[index] + await read(stream) == continuation(prompt_of(index), 200)
            assert await left == 0
        assert heard.moved >= 1
        await cells[0].wait_empty()


async def test_a_full_cell_passes_on_and_only_full_cells_refuse() -> None:
    config = SchedulerConfig(policy=Policy.RAGGED, batch_size=2, max_running=2, max_queued_sequences=2)
    async with two_cells(config, step_seconds=0.05) as cells:
        async with gateway(cells) as backend:
            # All have one beginning, so all would go to one cell.
            shared = tuple(range(20, 20 + PAGE_TOKENS))
            asked = [GenerationRequest((*shared, number), 40) for number in range(8)]
            streams = [await backend.submit(request) for request in asked]
            assert [cell.live_sequences for cell in cells] == [4, 4]
            with pytest.raises(AdmissionRefusedError) as refused:
                await backend.submit(request_of(1, 10))
            assert refused.value.cause is RefusalCause.QUEUE_FULL
            assert refused.value.retry_after_seconds
            for request, stream in zip(asked, streams, strict=True):
                assert await read(stream) == continuation(request.prompt, 40)
        for cell in cells:
            await cell.wait_empty()


async def test_limits_of_a_key_hold_over_all_cells() -> None:
    key = KeyClass("a", max_waiting=4, max_running=2).part_of(2)
    assert (key.max_waiting, key.max_running, key.tokens_per_minute) == (2, 1, None)
    config = SchedulerConfig(policy=Policy.RAGGED, keys=(key,))
    async with two_cells(config, step_seconds=0.05) as cells, gateway(cells) as backend:
        streams = [await backend.submit(request_of(number, 30, key="a")) for number in range(6)]
        with pytest.raises(AdmissionRefusedError) as refused:
            await backend.submit(request_of(9, 30, key="a"))
        assert refused.value.cause is RefusalCause.KEY_LIMIT
        for index, stream in enumerate(streams):
            assert await read(stream) == continuation(prompt_of(index), 30)
