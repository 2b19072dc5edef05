"""Faults on a served application under load, each until everything is in use again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
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
    """What became of a fault: who was hit, and the time until all was well. `stages`: seconds until parts of that."""

    window: Window
    process_id: int
    stages: Mapping[str, float]


class Faults:
    """`counts` are the workers of each role that there are when all is well.

    Every fault begins when all of them are in use and every target has sequences, and has ended when that is so again
    and every stream has gone on. No wait takes longer than `patience` seconds; beyond it ApplicationError is raised.
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
        known = (await self._all_well("before the fault", time.monotonic())).workers[role]
        victim = self._application.replicas(deployment)[0]
        begin = time.monotonic()
        victim.kill()
        what = f"a new {role} worker in the place of process {victim.pid}"
        await self._watcher.until(
            lambda report: self._all_in_use(report) and report.workers[role] != known, what, self._patience
        )
        stages = {"new worker in use": time.monotonic() - begin}
        await self._all_well("streams with the new worker", time.monotonic())
        return Struck(Window(begin, time.monotonic()), victim.pid, stages)

    async def kill_scheduler(self) -> Struck:
        return await self._strike_scheduler(signal.SIGKILL)

    async def stop_scheduler(self) -> Struck:
        """Stops it until another is in its place, and lets it go on if it still is there."""
        return await self._strike_scheduler(signal.SIGSTOP)

    async def stop_target(self, seconds: float | None) -> Struck:
        """Stops a target's process for so long; with None until the scheduler does without it."""
        await self._all_well("before the fault", time.monotonic())
        victim = self._application.replicas(TARGET)[0]
        stages = {}
        begin = time.monotonic()
        victim.send_signal(signal.SIGSTOP)
        try:
            if await self._fewer_targets(self._patience if seconds is None else seconds):
                stages["out of use"] = time.monotonic() - begin
            elif seconds is None:
                raise ApplicationError(f"a stopped target was in use for {self._patience:g} s")
            await asyncio.sleep(max(begin + (seconds or 0.0) - time.monotonic(), 0.0))
        finally:
            victim.send_signal(signal.SIGCONT)
        await self._all_well("the target that goes on is in use", time.monotonic())
        return Struck(Window(begin, time.monotonic()), victim.pid, stages)

    async def _strike_scheduler(self, number: signal.Signals) -> Struck:
        await self._all_well("before the fault", time.monotonic())
        (victim,) = self._application.replicas(SCHEDULER)
        stages = {}
        begin = time.monotonic()
        victim.send_signal(number)
        try:
            await self._replaced(victim)
            stages["new process"] = time.monotonic() - begin
            await self._watcher.until(self._all_in_use, "workers with the new scheduler", self._patience)
            stages["workers in use"] = time.monotonic() - begin
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGCONT)
                stages["old process goes on"] = time.monotonic() - begin
        await self._all_well("streams with the new scheduler", time.monotonic())
        return Struck(Window(begin, time.monotonic()), victim.pid, stages)

    async def _fewer_targets(self, seconds: float) -> bool:
        """Whether one was out of use in time."""
        try:
            await self._watcher.until(
                lambda report: len(report.workers["target"]) < self._counts["target"], "a target out of use", seconds
            )
        except ApplicationError:
            return False
        return True

    async def _replaced(self, victim: psutil.Process) -> None:
        end = time.monotonic() + self._patience
        while not [one for one in self._application.replicas(SCHEDULER) if one.pid != victim.pid]:
            if time.monotonic() > end:
                raise ApplicationError(f"no scheduler in the place of process {victim.pid} for {self._patience:g} s")
            await asyncio.sleep(_POLL_SECONDS)

    def _all_in_use(self, report: LoadReport) -> bool:
        return all(len(report.workers[role]) == count for role, count in self._counts.items())

    async def _all_well(self, what: str, since: float) -> LoadReport:
        def holds(report: LoadReport) -> bool:
            busy = report.busy_targets == report.workers["target"]
            return self._all_in_use(report) and busy and self._load.all_went_on(since)

        return await self._watcher.until(holds, what, self._patience)
