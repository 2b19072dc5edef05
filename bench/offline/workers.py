"""Starts every worker that a benchmark needs, each once, and makes cells out of those that a measurement uses."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from bench.offline.grid import GridPoint
from bench.offline.options import BenchOfflineSettings
from deploy.errors import RunError
from deploy.offline.cell import Cell, worker_launches
from deploy.progress import Reporter
from services.launch.launcher import LoadingMessage, ProcessStartError, RunningWorker, WorkerLaunch, WorkerLauncher
from services.rpc.channel_security import ChannelSecurity, random_token
from services.scheduler.epochs import EpochAuthority, MemoryRegister


class BenchWorkers:
    """Running workers, and which of them each cell of the grid uses."""

    def __init__(self, used: Mapping[GridPoint, Sequence[int]], security: ChannelSecurity) -> None:
        self._used = used
        self._security = security
        self._epochs = EpochAuthority(MemoryRegister())
        self._workers: Sequence[RunningWorker] = ()
        self._death = ""

    def started(self, workers: Sequence[RunningWorker]) -> None:
        self._workers = workers

    def died(self, worker_id: str, reason: str) -> None:
        self._death = f"worker {worker_id} died: {reason}"

    def cell(self, point: GridPoint) -> Cell:
        """Raises `RunError` once any worker has died: figures without it would be of something else."""
        self.check_alive()
        return Cell([self._workers[number] for number in self._used[point]], self._security, self._epochs)

    def check_alive(self) -> None:
        if self._death:
            raise RunError(self._death)


@asynccontextmanager
async def running_workers(
    settings: BenchOfflineSettings, points: Sequence[GridPoint], lengths: Sequence[int], reporter: Reporter
) -> AsyncIterator[BenchWorkers]:
    """Starts the workers of all cells; they stop at the end of the block. Raises `RunError`.

    They start one after the other: a worker that calibrates measures, and should have the machine to itself. Cells
    whose workers would be the same share them. All stay loaded, so that measurements of different workers can take
    turns. `lengths` are the positions of the longest sequences that can be under way at once.
    """
    launches, used = plan_workers(settings, points, lengths)
    security = ChannelSecurity(token=random_token())
    workers = BenchWorkers(used, security)

    def on_loading(loading: LoadingMessage) -> None:
        reporter.stage(loading.worker_id, loading.message, loading.fraction)

    try:
        async with AsyncExitStack() as stack:
            started: list[RunningWorker] = []
            for launch in launches:
                launcher = WorkerLauncher([launch], on_loading=on_loading, on_exit=workers.died, security=security)
                started += (await stack.enter_async_context(launcher)).workers
            workers.started(started)
            yield workers
    except ProcessStartError as error:
        raise RunError(str(error)) from error


def plan_workers(
    settings: BenchOfflineSettings, points: Sequence[GridPoint], lengths: Sequence[int]
) -> tuple[list[WorkerLaunch], dict[GridPoint, list[int]]]:
    """The workers to start, none twice, and for each cell the numbers of those that it uses."""
    launches: list[WorkerLaunch] = []
    used: dict[GridPoint, list[int]] = {}
    for point in points:
        taken: list[int] = []
        for launch in worker_launches(settings.run_settings(point), lengths):
            launch = _with_shared_threads(launch, settings)
            same = [
                number
                for number, other in enumerate(launches)
                if replace(other, name="") == launch and number not in taken
            ]
            if not same:
                number = sum(other.role is launch.role for other in launches)
                launches.append(replace(launch, name=f"{launch.role.value}-{number}"))
                same = [len(launches) - 1]
            taken.append(same[0])
        used[point] = taken
    return launches, used


def _with_shared_threads(launch: WorkerLaunch, settings: BenchOfflineSettings) -> WorkerLaunch:
    """On a GPU threads hardly matter, and a second copy of the target with other ones would cost its memory."""
    if launch.settings.get("device", "cpu") == "cpu":
        return launch
    threads = settings.models.threads or max(1, len(os.sched_getaffinity(0)) // 4)
    return replace(launch, threads=threads, settings={**launch.settings, "threads": threads})
