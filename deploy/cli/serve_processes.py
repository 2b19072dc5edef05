"""`spool serve --no-ray`: the cell as processes of this machine, children of this one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from filelock import Timeout
from rich.console import Console

from deploy.assembly.secrets import SecretError, channel_security
from deploy.cli.announcement import CTRL_C_STOPS, announce, served_already
from deploy.cluster.addresses import check_ports, grpc_address, http_url
from deploy.cluster.served_state import Served, StateFolder
from deploy.config.spool_config import SpoolConfig
from deploy.errors import RunError, UsageError
from deploy.event_loop import run_until_interrupted
from deploy.models import prepare_models
from deploy.processes.supervisor import CellProcesses, cell_workers, running_cell
from deploy.progress import LineReporter, Reporter, error_console, reporting
from services.launch.launcher import ProcessStartError, WorkerLaunch
from services.rpc.channel_security import ChannelSecurity, random_token

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve_without_ray(config: SpoolConfig) -> int:
    """Exit code 0 once it was stopped. Raises UsageError and RunError."""
    _check(config)
    config, security = config.on_one_machine(), _security(config)
    state, console, app_name = StateFolder(), error_console(), config.ray.app_name
    try:
        with state.lock(app_name):
            check_ports(config)
            with reporting(console) as reporter:
                prepare_models(config.models, config.models.drafts, reporter, config.engine.max_model_len)
                workers = cell_workers(config)
            with contextlib.suppress(KeyboardInterrupt):
                run_until_interrupted(_serve(config, workers, security, state, console), _STOPS)
    except Timeout:
        raise UsageError(served_already(app_name)) from None
    except ProcessStartError as error:
        raise RunError(f"{error} (logs: {state.run_folder(app_name)})") from error
    return 0


def _check(config: SpoolConfig) -> None:
    if config.ray.address is not None:
        raise UsageError(f"ray.address is {config.ray.address!r}, must be unset with --no-ray")
    if config.groups.cells > 1:
        raise UsageError(f"groups.cells is {config.groups.cells}, must be 1 with --no-ray: one machine is one cell")
    scaling = [f"groups.{role.value}" for role in config.roles if config.group(role).autoscaling is not None]
    scaling += ["gateway"] if config.gateway.autoscaling is not None else []
    for section in scaling:
        raise UsageError(
            f"{section}.autoscaling is set, must be unset with --no-ray: the numbers of processes are fixed"
        )


def _security(config: SpoolConfig) -> ChannelSecurity:
    """Read once, here: the processes get it from this one. Loopback is open to every user of the machine."""
    if not config.internal.chosen:
        return ChannelSecurity(token=random_token())
    try:
        return channel_security(config.internal)
    except SecretError as error:
        raise UsageError(str(error)) from error


async def _serve(
    config: SpoolConfig, workers: list[WorkerLaunch], security: ChannelSecurity, state: StateFolder, console: Console
) -> None:
    """Until it is cancelled."""
    lines = LineReporter(console)
    current: Reporter = lines

    def progress(name: str, message: str, fraction: float | None) -> None:
        current.stage(name, message, fraction)

    processes = CellProcesses(config, security, _emptied(state.run_folder(config.ray.app_name)), progress)
    async with AsyncExitStack() as running:
        with reporting(console) as current:
            group, scheduler_address = await running.enter_async_context(running_cell(processes, workers))
        current = lines
        served = _served(config, scheduler_address, state)
        state.write_security(served.app_name, security.to_json())
        state.write(served)
        running.callback(state.forget, served.app_name)
        announce(config, served, console, CTRL_C_STOPS)
        try:
            await group.watch()
        finally:
            console.print("stopping", highlight=False)


def _served(config: SpoolConfig, scheduler_address: str, state: StateFolder) -> Served:
    app_name = config.ray.app_name
    return Served(
        app_name=app_name,
        ray_address=None,
        process_id=os.getpid(),
        http_url=http_url(config),
        grpc_address=grpc_address(config),
        model=config.served_name,
        started_serve=False,
        scheduler_address=scheduler_address,
        log_folder=str(state.run_folder(app_name)),
    )


def _emptied(folder: Path) -> Path:
    """The folder, without what an earlier run left there."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise RunError(f"{folder} cannot be made: {error.strerror}") from error
    return folder
