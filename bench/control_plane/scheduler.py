"""A scheduler in a process of its own, with workers."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from spool.scheduler.config import SchedulerConfig
from spool.scheduler.messages import SendStep, StepCompleted
from spool.services.launch.launcher import WorkerLaunch, WorkerLauncher
from spool.services.launch.process_tuning import keep_loaded_objects
from spool.services.observability.observer import ServiceObserver, StepTimings
from spool.services.rpc.channel_security import ChannelSecurity, random_token
from spool.services.scheduler.server import SchedulerServer
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler.workers.worker_link import WorkerEndpoint
from spool.services.scheduler_client.remote import SchedulerClient


class Rounds(ServiceObserver):
    """Where a round's time goes. The target has one step after the other, so its time is that of passes, of its own
    Python, and of waiting for a step. Meanwhile the answer before becomes the next step, within the scheduler's process
    and on the way there and back. That step is then `queued` until its turn."""

    def __init__(self) -> None:
        self._answered: float | None = None
        self._seconds = defaultdict[str, list[float]](list)

    def step_sent(self, step: SendStep, now: float) -> None:
        if self._answered is not None:
            self._seconds["scheduler"].append(now - self._answered)
            self._answered = None

    def step_replied(self, step: SendStep, answer: StepCompleted, timings: StepTimings, now: float) -> None:
        passes, between = timings.forward + timings.drafting, min(timings.idle, timings.queued)
        self._answered = now
        for name, seconds in (
            ("passes", passes),
            ("worker", timings.total - passes + between),
            ("waiting", timings.idle - between),
            ("queued", timings.queued),
        ):
            self._seconds[name].append(seconds)

    def take(self) -> dict[str, float]:
        """Microseconds, the medians of the rounds since it was called last."""
        taken = {name: 1e6 * median(seconds) for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken


@asynccontextmanager
async def running(
    config: SchedulerConfig, launches: Sequence[WorkerLaunch]
) -> AsyncIterator[tuple[SchedulerClient, Any, WorkerLauncher]]:
    """A gateway's client, the connection to the scheduler's process, and the workers."""
    security = ChannelSecurity(token=random_token())
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    async with WorkerLauncher(launches, security=security) as launcher:
        endpoints = [WorkerEndpoint(one.worker_id, one.role, one.address) for one in launcher.workers]
        process = context.Process(target=run_scheduler, args=(theirs, config, endpoints, security), daemon=True)
        process.start()
        theirs.close()
        try:
            address: str = await asyncio.to_thread(ours.recv)

            async def resolve() -> str:
                return address

            async with SchedulerClient([resolve], security=security) as client:
                yield client, ours, launcher
        finally:
            ours.close()
            process.terminate()
            process.join()


def run_scheduler(
    connection: Connection, config: SchedulerConfig, endpoints: list[WorkerEndpoint], security: ChannelSecurity
) -> None:
    """Sends its address, and the figures that it has taken since something came last, each time that something comes.
    None ends it."""
    asyncio.run(_serve(connection, config, endpoints, security))


async def _serve(
    connection: Connection, config: SchedulerConfig, endpoints: list[WorkerEndpoint], security: ChannelSecurity
) -> None:
    loop, rounds = asyncio.get_running_loop(), Rounds()
    asked: asyncio.Queue[object] = asyncio.Queue()
    async with SchedulerService(
        config, scheduler_epoch=time.time_ns(), security=security, observers=[rounds]
    ) as service:
        server = SchedulerServer(service, security=security)
        address = await server.start()
        await service.workers.add(endpoints)
        keep_loaded_objects()

        def received() -> None:
            try:
                asked.put_nowait(connection.recv())
            except EOFError:  # who has started this process is gone
                loop.remove_reader(connection.fileno())
                asked.put_nowait(None)

        loop.add_reader(connection.fileno(), received)
        connection.send(address)
        while await asked.get() is not None:
            connection.send((rounds.take(), time.process_time(), service.statistics()))
            service.reset_statistics()
        await server.stop()
