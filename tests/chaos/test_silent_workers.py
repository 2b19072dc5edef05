"""Worker processes that stand still, and others that only compute for long."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role
from services.launch.launcher import RunningWorker, WorkerLaunch, WorkerLauncher
from services.scheduler.service import SchedulerService
from services.scheduler.workers.worker_link import WorkerEndpoint
from tests.support.cells import LINKS, ROOT, prompt_of
from tests.support.stand_in_worker import continuation
from tests.support.waiting import LONG, until

pytestmark = pytest.mark.slow

# A test that waits for a step to time out fails.
PATIENT = replace(LINKS, connect_timeout=LONG, step_timeout=10 * LONG)
STREAMS = 16


@asynccontextmanager
async def targets(count: int, step_seconds: float) -> AsyncIterator[tuple[SchedulerService, list[RunningWorker]]]:
    launch = WorkerLaunch(
        Role.TARGET,
        {"step_seconds": step_seconds},
        module="tests.support.stand_in_worker",
        environment={"PYTHONPATH": str(ROOT)},
    )
    config = SchedulerConfig(policy=Policy.RAGGED, draft_length=0)
    async with (
        WorkerLauncher([launch] * count) as launcher,
        SchedulerService(config, scheduler_epoch=time.time_ns(), link_options=PATIENT) as service,
    ):
        workers = list(launcher.workers)
        await service.workers.add([WorkerEndpoint(one.worker_id, one.role, one.address) for one in workers])
        yield service, workers


def test_sequences_of_a_worker_that_is_stopped_go_on_elsewhere_and_it_is_used_again() -> None:
    async def run() -> None:
        async with targets(2, step_seconds=0.02) as (service, workers):
            streams = [service.submit(prompt_of(index), 200) for index in range(STREAMS)]
            await until(lambda: service.statistics().tokens > STREAMS)
            process = workers[0].process_id
            os.kill(process, signal.SIGSTOP)
            try:
                async with asyncio.timeout(LONG):
                    texts = [list(await stream.collect()) for stream in streams]
                assert workers[0].worker_id not in service.workers.up
            finally:
                os.kill(process, signal.SIGCONT)
            assert texts == [continuation(prompt_of(index), 200) for index in range(STREAMS)]
            await until(lambda: len(service.workers.up) == 2)
            assert list(await service.submit(prompt_of(1), 20).collect()) == continuation(prompt_of(1), 20)

    asyncio.run(run())


def test_a_step_may_take_longer_than_a_worker_may_be_silent() -> None:
    async def run() -> None:
        async with targets(1, step_seconds=3.5 * PATIENT.silence_timeout) as (service, _):
            assert list(await service.submit(prompt_of(1), 3).collect()) == continuation(prompt_of(1), 3)
            assert service.statistics().workers_lost == 0

    asyncio.run(run())
