"""What the scheduler service has its core do, counted: however much happens at once, little more is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.messages import Command, Role, SequenceRequest, WorkerJoined, WorkerSpec
from scheduler.statistics import Snapshot
from services.backend.sequence_stream import SequenceStream
from services.scheduler.service import SchedulerService

CROWD = 1000


class CountingCore(SchedulerCore):
    plans = 0
    snapshots = 0

    def plan(self, now: float) -> list[Command]:
        self.plans += 1
        return super().plan(now)

    def snapshot(self) -> Snapshot:
        self.snapshots += 1
        return super().snapshot()


def counted(check: Callable[[SchedulerService, CountingCore], Awaitable[None]], queue: int = CROWD) -> None:
    """Runs `check` on a service whose only worker, a target with little room, never answers."""

    async def run() -> None:
        config = SchedulerConfig(max_running=4, max_queued_sequences=queue)
        async with SchedulerService(config, scheduler_epoch=1) as service:
            service._core = core = CountingCore(config)
            core.handle([WorkerJoined(WorkerSpec("target", Role.TARGET, 16, 100, 100, 64))], 0.0)
            core.plans = 0
            await check(service, core)

    asyncio.run(run())


def test_what_happens_in_one_turn_of_the_event_loop_is_planned_for_once() -> None:
    async def check(service: SchedulerService, core: CountingCore) -> None:
        streams = [service.submit((1, 2, 3), 5) for _ in range(CROWD)]
        assert core.plans == 0
        await asyncio.sleep(0)
        assert core.plans == 1
        assert (core.snapshot().running, core.waiting) == (4, CROWD - 4)
        for stream in streams:
            service.cancel(stream.sequence_id)
        await asyncio.sleep(0)
        assert core.plans == 2
        assert core.snapshot().live == 0

    counted(check)


def test_events_keep_no_deadline_waiting() -> None:
    """Nothing is planned twice, and nothing is forgotten, where an event comes while a plan is due anyway."""

    async def check(service: SchedulerService, core: CountingCore) -> None:
        for turn in range(5):
            service.submit((1, 2, 3), 5)
            await asyncio.sleep(0)
            assert core.plans == turn + 1

    counted(check)


def test_output_does_not_wait_for_the_plan() -> None:
    async def check(service: SchedulerService, core: CountingCore) -> None:
        ended = SequenceStream(service.new_sequence_id(), service.cancel, "", "")
        service.enter(SequenceRequest(ended.sequence_id, (1,), 2, committed_output=(5, 6)), ended)
        assert core.plans == 0
        assert await ended.collect() == []

    counted(check)
