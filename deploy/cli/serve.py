"""`spool serve`: from a configuration to a running application, on Ray or as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from filelock import Timeout

from spool.deploy.assembly.secrets import SecretError, channel_security, client_secrets
from spool.deploy.cluster.addresses import (
    authority_file,
    check_ports,
    curl_line,
    grpc_address,
    http_url,
    metrics_urls,
    with_metrics_port,
)
from spool.deploy.cluster.client import (
    application_state,
    connected,
    gateway_nodes,
    ray_log_folder,
    serve_client,
    stop_application,
)
from spool.deploy.cluster.deployment import deploy, watch
from spool.deploy.cluster.local_ray import LocalRay
from spool.deploy.cluster.served_state import Served, StateFolder
from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.errors import RunError, UsageError
from spool.deploy.event_loop import run_until_interrupted
from spool.deploy.models import prepare_models
from spool.deploy.processes.supervisor import running_cell
from spool.deploy.progress import Reporter, say
from spool.deploy.workers import cell_workers
from spool.services.launch.launcher import ProcessStartError, WorkerLaunch
from spool.services.rpc.channel_security import ChannelSecurity, random_token

# A closed terminal, and what service managers send.
_LIKE_INTERRUPT = (signal.SIGTERM, signal.SIGHUP)

_DOWN_STOPS = "`spool down` stops it."
_CTRL_C_STOPS = "Ctrl-C stops it."


def serve(config: SpoolConfig, detach: bool) -> int:
    """Serves on Ray. Exit code 0 once it was stopped, or with `detach` once it serves.

    Raises UsageError and RunError.
    """
    with _handling(_LIKE_INTERRUPT, _interrupt):
        if config.ray.address is None:
            _on_own_ray(config, detach)
        else:
            _on_ray_of_others(config, config.ray.address, detach)
    return 0


def serve_without_ray(config: SpoolConfig) -> int:
    """Exit code 0 once it was stopped. Raises UsageError and RunError."""
    _check_without_ray(config)
    _check_secrets(config)
    state = StateFolder()
    with _under_a_name(with_metrics_port(config.on_one_machine()), state) as config:
        try:
            check_ports(config)
            prepare_models(config, Reporter())
            processes = _serve_processes(config, cell_workers(config), _security(config), state)
            with contextlib.suppress(KeyboardInterrupt):
                run_until_interrupted(processes, (signal.SIGINT, *_LIKE_INTERRUPT))
        except ProcessStartError as error:
            raise RunError(f"{error} (logs: {state.run_folder(config.ray.app_name)})") from error
    return 0


def _on_own_ray(config: SpoolConfig, detach: bool) -> None:
    state, app_name = StateFolder(), config.ray.app_name
    config = with_metrics_port(config.on_one_machine())
    if state.is_alive(app_name):
        raise _served_already(app_name)
    _check_secrets(config)
    check_ports(config)
    reporter = Reporter()
    ray = LocalRay(app_name, state)
    try:
        prepare_models(config, reporter)
        reporter.stage("ray", "starting", None)
        ray.wait_until_up()
        reporter.stage("ray", "started", None)
        with connected(ray.address, state), _handling(_LIKE_INTERRUPT, _interrupt):
            deploy(config, Reporter())
            served = _served(config, ray.address, ray.process_id, ray_log_folder(), started_serve=True)
            state.write(served)
            if detach:
                ray.detach()
            _finish(config, served, detach)
    finally:
        if ray.attached:
            ray.stop()
            state.forget(app_name)


def _on_ray_of_others(config: SpoolConfig, address: str, detach: bool) -> None:
    state, app_name = StateFolder(), config.ray.app_name
    stays = False
    with connected(address, None), _handling(_LIKE_INTERRUPT, _interrupt):
        started_serve = serve_client() is None
        if not started_serve and application_state(app_name)["status"] != "NOT_STARTED":
            raise _served_already(app_name)
        try:
            deploy(config, Reporter())
            served = _served(_as_reached(config), address, None, ray_log_folder(), started_serve)
            state.write(served)
            stays = detach
            _finish(config, served, detach)
        finally:
            if not stays:
                stop_application(app_name, started_serve)
                state.forget(app_name)


def _as_reached(config: SpoolConfig) -> SpoolConfig:
    """With the address of a node that has a gateway, where the one that this process is on has none."""
    gateway, (here, nodes) = config.gateway, gateway_nodes(config.ray.app_name)
    if here in nodes or not nodes:
        return config
    if gateway.listens_on_loopback:
        say(
            f"gateway.host is {gateway.host}, which only {nodes[0]} reaches, where the gateway runs: choose 0.0.0.0, "
            "or this node by gateway.resources or gateway.node_labels"
        )
    elif gateway.host in ("0.0.0.0", "::"):
        return config.model_copy(update={"gateway": gateway.model_copy(update={"host": nodes[0]})})
    return config


def _finish(config: SpoolConfig, served: Served, detach: bool) -> None:
    """Without `detach`, returns at Ctrl-C, or when somebody else stops the application."""
    if detach:
        _announce(config, served, _DOWN_STOPS)
        return
    stop = threading.Event()
    # An exception inside Ray's own code would be handled by Ray.
    with _handling((signal.SIGINT, *_LIKE_INTERRUPT), stop.set):
        _announce(config, served, _CTRL_C_STOPS)
        watch(served.app_name, say, stop)
    say("stopping" if stop.is_set() else f"{served.app_name} was stopped")


async def _serve_processes(
    config: SpoolConfig, workers: list[WorkerLaunch], security: ChannelSecurity, state: StateFolder
) -> None:
    """Until it is cancelled."""
    app_name = config.ray.app_name
    folder = _emptied(state.run_folder(app_name))
    async with AsyncExitStack() as running:
        cell = running_cell(config, workers, security, folder, Reporter().stage)
        group, scheduler_address = await running.enter_async_context(cell)
        served = replace(
            _served(config, None, os.getpid(), str(folder), started_serve=False),
            scheduler_address=scheduler_address,
            scheduler_security=security.to_json(),
        )
        state.write(served)
        running.callback(state.forget, app_name)
        _announce(config, served, _CTRL_C_STOPS)
        try:
            await group.watch()
        finally:
            say("stopping")


@contextmanager
def _under_a_name(config: SpoolConfig, state: StateFolder) -> Iterator[SpoolConfig]:
    """The configuration with a name that no other server has for the length of the block.

    Servers without Ray differ by their ports: one beside another has its port in its name, unless a name was chosen.
    Raises UsageError.
    """
    name, other = config.ray.app_name, state.read(config.ray.app_name)
    beside = [] if "app_name" in config.ray.model_fields_set else [f"{name}-{config.gateway.port}"]
    with contextlib.ExitStack() as held:
        for own in (name, *beside):
            try:
                held.enter_context(state.lock(own))
            except Timeout:
                if other is not None and other.http_url == http_url(config):
                    break
                continue
            ray = config.ray.model_copy(update={"app_name": own})
            yield config if own == name else config.model_copy(update={"ray": ray})
            return
    raise _served_already(name)


def _check_without_ray(config: SpoolConfig) -> None:
    if config.ray.address is not None:
        raise UsageError(f"ray.address is {config.ray.address!r}, must be unset with --no-ray")
    if config.groups.cells > 1:
        raise UsageError(f"groups.cells is {config.groups.cells}, must be 1 with --no-ray: one machine is one cell")
    scaling = [f"groups.{role.value}" for role in config.roles if config.group(role).autoscaling is not None]
    scaling += ["gateway"] if config.gateway.autoscaling is not None else []
    if scaling:
        raise UsageError(
            f"{scaling[0]}.autoscaling is set, must be unset with --no-ray: the numbers of processes are fixed"
        )


def _check_secrets(config: SpoolConfig) -> None:
    """Where all processes run on this machine, with this environment: before anything is loaded."""
    try:
        client_secrets(config)
        channel_security(config.internal)
    except SecretError as error:
        raise UsageError(str(error)) from error


def _security(config: SpoolConfig) -> ChannelSecurity:
    """The secrets are read here and passed to the processes. Loopback is open to every user of the machine."""
    return channel_security(config.internal) if config.internal.chosen else ChannelSecurity(token=random_token())


def _served(
    config: SpoolConfig, ray_address: str | None, process_id: int | None, log_folder: str, started_serve: bool
) -> Served:
    return Served(
        app_name=config.ray.app_name,
        ray_address=ray_address,
        process_id=process_id,
        http_url=http_url(config),
        grpc_address=grpc_address(config),
        model=config.served_name,
        started_serve=started_serve,
        log_folder=log_folder,
    )


def _announce(config: SpoolConfig, served: Served, end: str) -> None:
    drafted = f", drafted by {config.models.draft_name}" if config.models.drafts else ""
    app = "" if served.app_name == "spool" else f" --app {served.app_name}"
    lines = [f"{config.models.target} is served{drafted}", f"  HTTP  {served.http_url}/v1"]
    if served.grpc_address is not None:
        lines.append(f"  gRPC  {served.grpc_address}")
    file = authority_file(config)
    authority = "" if file is None else f" --ca-file {shlex.quote(file)}"
    lines += [
        f"  page  {served.http_url}/dashboard",
        f"  try   {curl_line(config, served.http_url)}",
        f"  chat  spool chat{app}{authority}",
        f"  metrics  {' '.join(metrics_urls(config, served.http_url))}",
        end,
    ]
    say("\n".join(lines))


def _served_already(app_name: str) -> UsageError:
    more = "another needs a gateway.port and, on Ray, a ray.app_name of its own"
    return UsageError(f"{app_name} is served already (`spool down` stops it; {more})")


def _emptied(folder: Path) -> Path:
    """The folder, without the files of an earlier run."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise RunError(f"{folder} cannot be made: {error.strerror}") from error
    return folder


def _interrupt() -> None:
    raise KeyboardInterrupt


@contextmanager
def _handling(numbers: Sequence[signal.Signals], handle: Callable[[], None]) -> Iterator[None]:
    """Calls `handle` at these signals. Joining Ray replaces the handlers, so this is used again after that."""
    before = [signal.signal(number, lambda *_: handle()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
