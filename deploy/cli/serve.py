"""`spool serve` on Ray: from a configuration to a running application."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from deploy.cli.announcement import CTRL_C_STOPS, DOWN_STOPS, announce, served_already
from deploy.cluster.addresses import check_ports, grpc_address, http_url
from deploy.cluster.client import (
    application_state,
    connected,
    ray_log_folder,
    serve_is_running,
    stop_application,
)
from deploy.cluster.deployment import deploy, watch
from deploy.cluster.local_ray import LocalRay, start_ray
from deploy.cluster.served_state import Served, StateFolder
from deploy.config.spool_config import SpoolConfig
from deploy.errors import UsageError
from deploy.models import prepare_models
from deploy.progress import error_console, reporting

# A closed terminal, and what service managers send.
_LIKE_INTERRUPT = (signal.SIGTERM, signal.SIGHUP)


def serve(config: SpoolConfig, detach: bool) -> int:
    """Exit code 0 once it was stopped, or with `detach` once it serves. Raises UsageError and RunError."""
    with _handling(_LIKE_INTERRUPT, _interrupt):
        if config.ray.address is None:
            return _on_own_ray(config, detach)
        return _on_ray_of_others(config, config.ray.address, detach)


def _on_own_ray(config: SpoolConfig, detach: bool) -> int:
    state, console, app_name = StateFolder(), error_console(), config.ray.app_name
    if state.is_alive(app_name):
        raise UsageError(served_already(app_name))
    check_ports(config)
    with reporting(console) as reporter:
        prepare_models(config.models, config.models.drafts, reporter, config.engine.max_model_len)
        reporter.stage("ray", "starting", None)
        ray = start_ray(app_name, config.ray, state)
        reporter.stage("ray", "started", 1.0)
    try:
        with connected(ray.address, config.ray.namespace, state), _handling(_LIKE_INTERRUPT, _interrupt):
            _deploy(config.on_one_machine(), console)
            served = _served(config, ray.address, ray, started_serve=True)
            state.write(served)
            if detach:
                ray.detach()
                announce(config, served, console, DOWN_STOPS)
            else:
                _stay(config, served, console)
    finally:
        if ray.attached:
            ray.stop()
            state.forget(app_name)
    return 0


def _on_ray_of_others(config: SpoolConfig, address: str, detach: bool) -> int:
    state, console, app_name = StateFolder(), error_console(), config.ray.app_name
    stays = False
    with connected(address, config.ray.namespace, None), _handling(_LIKE_INTERRUPT, _interrupt):
        started_serve = not serve_is_running()
        if not started_serve and application_state(app_name).known:
            raise UsageError(served_already(app_name))
        try:
            _deploy(config, console)
            served = _served(config, address, None, started_serve)
            state.write(served)
            stays = detach
            if detach:
                announce(config, served, console, DOWN_STOPS)
            else:
                _stay(config, served, console)
        finally:
            if not stays:
                stop_application(app_name, started_serve)
                state.forget(app_name)
    return 0


def _deploy(config: SpoolConfig, console: Console) -> None:
    with reporting(console) as reporter:
        deploy(config, reporter)


def _stay(config: SpoolConfig, served: Served, console: Console) -> None:
    """Until Ctrl-C, or until somebody else stops the application."""
    stop = threading.Event()
    # An exception in the midst of Ray's own code would be its to handle.
    with _handling((signal.SIGINT, *_LIKE_INTERRUPT), stop.set):
        announce(config, served, console, CTRL_C_STOPS)
        watch(served.app_name, lambda line: console.print(line, highlight=False, markup=False), stop)
    console.print("stopping" if stop.is_set() else f"{served.app_name} was stopped", highlight=False)


def _served(config: SpoolConfig, address: str, ray: LocalRay | None, started_serve: bool) -> Served:
    return Served(
        app_name=config.ray.app_name,
        ray_address=address,
        process_id=None if ray is None else ray.process_id,
        http_url=http_url(config),
        grpc_address=grpc_address(config),
        model=config.served_name,
        started_serve=started_serve,
        log_folder=ray_log_folder(),
    )


def _interrupt() -> None:
    raise KeyboardInterrupt


@contextmanager
def _handling(numbers: Sequence[signal.Signals], handle: Callable[[], None]) -> Iterator[None]:
    """Calls `handle` at these signals. Once Ray is joined it has taken them for itself, until this is used again."""
    before = [signal.signal(number, lambda *_: handle()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
