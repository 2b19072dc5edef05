"""The processes of a cell without Ray: scheduler, gateways and workers, restarted when they die."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.config.spool_config import SpoolConfig
from deploy.processes.task import TASK_VARIABLE, Task
from deploy.workers import plan_workers
from engine.settings import EngineSettings
from scheduler.messages import Role
from services.launch.child_process import ChildGroup, ChildProcess, Command, Progress
from services.launch.launcher import WorkerLaunch
from services.launch.process_tuning import compute_environment
from services.rpc.channel_security import SECURITY_VARIABLE, ChannelSecurity

_RESTART_SECONDS = 1.0


def cell_workers(config: SpoolConfig) -> list[WorkerLaunch]:
    """The workers that a configuration starts on this machine, with names. Raises UsageError and RunError."""

    def engine_of(role: Role, device: str) -> EngineSettings | None:
        return config.engine_settings(role, device, config.threads(role)) if config.has_model(role) else None

    places = [(role, number) for role in config.roles for number in range(config.group(role).replicas)]
    gpu_roles = [role for role in config.roles if config.group(role).num_gpus != 0]
    launches = plan_workers([role for role, _ in places], config.models.device, engine_of, gpu_roles)
    names = [f"{role.value}-{number}" for role, number in places]
    return [replace(launch, name=name) for launch, name in zip(launches, names, strict=True)]


@dataclass(frozen=True, slots=True)
class CellProcesses:
    """Makes the processes of one cell; `folder` takes their logs, one file each."""

    config: SpoolConfig
    security: ChannelSecurity
    folder: Path
    progress: Progress

    def scheduler(self) -> ChildProcess:
        return self._child("scheduler", self._task("scheduler", ""), {})

    def gateway(self, number: int, scheduler: str) -> ChildProcess:
        return self._child("gateway", self._task(f"gateway-{number}", scheduler), {})

    def worker(self, worker: WorkerLaunch, scheduler: str) -> ChildProcess:
        task = replace(self._task(worker.name, scheduler), role=worker.role.value, engine=dict(worker.settings))
        variables = compute_environment(worker.threads, self.config.engine.cpu_isa)
        return self._child("worker", task, variables | self.config.group(worker.role).environment)

    def _task(self, name: str, scheduler: str) -> Task:
        return Task(name, str(self.folder), self.config.plain(), scheduler)

    def _child(self, kind: str, task: Task, variables: Mapping[str, str]) -> ChildProcess:
        def command(port: int) -> Command:
            own = {TASK_VARIABLE: replace(task, port=port).to_json(), SECURITY_VARIABLE: self.security.to_json()}
            return Command("deploy.processes", [kind, task.name], {**variables, **own})

        return ChildProcess(task.name, command, self.folder / f"{task.name}.log", self.progress)


@asynccontextmanager
async def running_cell(
    processes: CellProcesses, workers: Sequence[WorkerLaunch]
) -> AsyncIterator[tuple[ChildGroup, str]]:
    """Yields the group of all processes, which are up then, and the scheduler's address.

    Raises ProcessStartError for a process that does not start; then none is left running. All processes end with this
    one, however it ends.
    """
    group = ChildGroup(lambda name, reason: processes.progress(name, reason, None), _RESTART_SECONDS)
    async with group:
        scheduler = processes.scheduler()
        await group.start(scheduler)
        gateways = [processes.gateway(number, scheduler.address) for number in range(processes.config.gateway.replicas)]
        await group.start(*gateways, *(processes.worker(worker, scheduler.address) for worker in workers))
        yield group, scheduler.address
