"""Faults on a served application under load, each until everything is in use again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from bench.chaos.application import DRAFT, SCHEDULER, TARGET, Application, ApplicationError, LoadReport, Watcher
from bench.chaos.pauses import Window
from bench.chaos.streams import ConstantLoad

_ROLES = {DRAFT: "draft", TARGET: "target"}
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Struck:
    """The process that was hit, and the time until everything had recovered."""

    window: Window
    process_id: int


class Faults:
    """`counts` are the workers of each role.

    A fault begins when all of them are in use and every target has sequences. It has ended when that is the case again
    and every stream has gone on. A wait of more than `patience` seconds raises ApplicationError.
    """

    def __init__(
        self,
        application: Application,
        watcher: Watcher,
        load: ConstantLoad,
        counts: Mapping[str, int],
        patience: float = 180.0,
    ) -> None:
        self._application = application
        self._watcher = watcher
        self._load = load
        self._counts = counts
        self._patience = patience

    async def kill_worker(self, deployment: str) -> Struck:
        role = _ROLES[deployment]
        known = (await self._recovered("before the fault", time.monotonic())).workers[role]
        victim = self._application.replicas(deployment)[0]
        begin = time.monotonic()
        victim.kill()
        what = f"a new {role} worker in the place of process {victim.pid}"
        await self._watcher.until(
            lambda report: self._all_in_use(report) and report.workers[role] != known, what, self._patience
        )
        await self._recovered("streams with the new worker", time.monotonic())
        return Struck(Window(begin, time.monotonic()), victim.pid)

    async def kill_scheduler(self) -> Struck:
        await self._recovered("before the fault", time.monotonic())
        (victim,) = self._application.replicas(SCHEDULER)
        begin = time.monotonic()
        victim.kill()
        await self._replaced(victim)
        await self._watcher.until(self._all_in_use, "workers with the new scheduler", self._patience)
        await self._recovered("streams with the new scheduler", time.monotonic())
        return Struck(Window(begin, time.monotonic()), victim.pid)

    async def stop_worker(self, deployment: str, seconds: float | None) -> Struck:
        """Stops a worker's process for this time; with None until the scheduler does without it."""
        role = _ROLES[deployment]
        await self._recovered("before the fault", time.monotonic())
        victim = self._application.replicas(deployment)[0]
        begin = time.monotonic()
        victim.suspend()
        try:
            if seconds is None:
                fewer = self._counts[role]
                await self._watcher.until(
                    lambda report: len(report.workers[role]) < fewer, f"a {role} out of use", self._patience
                )
            else:
                await asyncio.sleep(seconds)
        finally:
            victim.resume()
        await self._recovered(f"the {role} that goes on is in use", time.monotonic())
        return Struck(Window(begin, time.monotonic()), victim.pid)

    async def _replaced(self, victim: psutil.Process) -> None:
        end = time.monotonic() + self._patience
        while not [one for one in self._application.replicas(SCHEDULER) if one.pid != victim.pid]:
            if time.monotonic() > end:
                raise ApplicationError(f"no scheduler in the place of process {victim.pid} for {self._patience:g} s")
            await asyncio.sleep(_POLL_SECONDS)

    def _all_in_use(self, report: LoadReport) -> bool:
        return all(len(report.workers[role]) == count for role, count in self._counts.items())

    async def _recovered(self, what: str, since: float) -> LoadReport:
        def holds(report: LoadReport) -> bool:
            busy = report.busy_targets == report.workers["target"]
            return self._all_in_use(report) and busy and self._load.all_went_on(since)

        return await self._watcher.until(holds, what, self._patience)
