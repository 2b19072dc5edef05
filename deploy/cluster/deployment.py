"""Deploys an application on a Ray that this process has joined, and watches it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from spool.deploy.cluster.client import application_state, first_line, reason_of_failure, serve_client
from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.errors import RunError
from spool.deploy.progress import Reporter
from spool.deploy.ray_app import PROXIES
from spool.deploy.ray_app.serve_options import serve_content

_POLL_SECONDS = 0.3
_WATCH_SECONDS = 5.0


def deploy(config: SpoolConfig, reporter: Reporter) -> None:
    """Returns once every replica is up. Raises RunError with the reason of one that does not start."""
    from ray import serve

    from spool.deploy.ray_app.gpus import on_gpus_of_ray

    app_name = config.ray.app_name
    config = on_gpus_of_ray(config)
    serve.start(proxy_location=PROXIES)
    try:
        if config.scales:
            _deploy_file(config)
        else:
            _deploy_application(config)
    except Exception as error:  # Ray's errors have no common ancestor
        raise RunError(f"{app_name} cannot be deployed: {first_line(error)}") from error
    pause = threading.Event()
    while (state := application_state(app_name))["status"] != "RUNNING":
        _report(state, reporter)
        if state["status"] == "DEPLOY_FAILED":
            raise RunError(_failure(state))
        pause.wait(_POLL_SECONDS)
    _report(state, reporter)


def _deploy_application(config: SpoolConfig) -> None:
    from ray import serve

    from spool.deploy.ray_app.application import application

    target = serve.RunTarget(target=application(config), name=config.ray.app_name, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)


def _deploy_file(config: SpoolConfig) -> None:
    """As `serve deploy` does: Serve takes a policy for a whole application in no other way."""
    from ray.serve.schema import ServeDeploySchema

    from spool.deploy.ray_app.application import settled

    client = serve_client()
    content = serve_content(settled(config))
    # Serve takes down what was deployed from a file before and is not in this one.
    others = client.get_serve_details()["applications"]
    content["applications"] += [
        other["deployed_app_config"]
        for name, other in others.items()
        if name != config.ray.app_name and other["source"] == "declarative"
    ]
    client.deploy_apps(ServeDeploySchema.model_validate(content))


def _report(state: Mapping[str, Any], reporter: Reporter) -> None:
    """How far each deployment is."""
    for name, deployment in state["deployments"].items():
        running, total = _running(deployment)
        what = reason_of_failure(deployment["message"]) if deployment["message"] else "starting"
        reporter.stage(name, "up" if running == total > 0 else f"{running} of {max(total, 1)} up, {what}", None)


def _running(deployment: Mapping[str, Any]) -> tuple[int, int]:
    """Replicas that are up, and all."""
    replicas = deployment["replicas"]
    return replicas.get("RUNNING", 0), sum(replicas.values())


def watch(app_name: str, tell: Callable[[str], None], stop: threading.Event) -> None:
    """Reports changes of the number of replicas that are up, until `stop` is set or the application is gone."""
    known: dict[str, tuple[int, int]] = {}
    while not stop.is_set():
        try:
            state = application_state(app_name)
        except Exception as error:  # Ray's errors have no common ancestor
            raise RunError(f"Ray does not answer any more: {first_line(error)}") from error
        if state["status"] in ("NOT_STARTED", "DELETING"):
            return
        for name, deployment in state["deployments"].items():
            now = _running(deployment)
            if known.get(name, now) != now:
                tell(f"{name}: {now[0]} of {now[1]} replicas up")
            known[name] = now
        stop.wait(_WATCH_SECONDS)


def _failure(state: Mapping[str, Any]) -> str:
    for name, deployment in state["deployments"].items():
        if deployment["status"] in ("DEPLOY_FAILED", "UNHEALTHY"):
            return f"{name} does not start: {reason_of_failure(deployment['message'])}"
    return f"the application does not start: {reason_of_failure(state['message'])}"
