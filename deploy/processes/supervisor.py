"""The processes of a cell without Ray: scheduler, gateways and workers, restarted when they die."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.processes.task import TASK_VARIABLE, Task
from spool.services.launch.child_process import ChildGroup, ChildProcess, Command, Progress
from spool.services.launch.launcher import WorkerLaunch
from spool.services.launch.process_tuning import compute_environment
from spool.services.rpc.channel_security import SECURITY_VARIABLE, ChannelSecurity

_RESTART_SECONDS = 1.0


@asynccontextmanager
async def running_cell(
    config: SpoolConfig, workers: Sequence[WorkerLaunch], security: ChannelSecurity, folder: Path, progress: Progress
) -> AsyncIterator[tuple[ChildGroup, str]]:
    """Yields the group of all processes, which start side by side and are up then, and the scheduler's address.

    `folder` takes their logs, one file each. Raises ProcessStartError for a process that does not start; then none is
    left running. All processes end with this one, however it ends.
    """

    def child(kind: str, task: Task, variables: Mapping[str, str]) -> ChildProcess:
        def command(port: int) -> Command:
            own = {TASK_VARIABLE: replace(task, port=port).to_json(), SECURITY_VARIABLE: security.to_json()}
            return Command("spool.deploy.processes", [kind, task.name], {**variables, **own})

        return ChildProcess(task.name, command, folder / f"{task.name}.log", progress)

    def worker(launch: WorkerLaunch) -> ChildProcess:
        task = replace(without_keys, name=launch.name, role=launch.role.value, engine=dict(launch.settings))
        variables = compute_environment(launch.threads, config.engine.cpu_isa)
        return child("worker", task, hidden | variables | config.group(launch.role).environment)

    # Of what this process was given, only gateways are to know the keys of clients.
    hidden = {name: "" for name in (config.auth.api_keys_env, config.auth.metrics_keys_env) if name is not None}
    group = ChildGroup(lambda name, reason: progress(name, reason, None), _RESTART_SECONDS)
    async with group:
        without_keys = Task("scheduler", str(folder), config.without_client_keys().plain())
        with_keys = replace(without_keys, settings=config.plain())
        scheduler = child("scheduler", without_keys, hidden)
        gateways = [replace(with_keys, name=f"gateway-{number}") for number in range(config.gateway.replicas)]
        await group.start(scheduler, *(child("gateway", task, {}) for task in gateways), *map(worker, workers))
        yield group, scheduler.address
