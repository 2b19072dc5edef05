"""This process as a client of a Ray cluster and of the Serve application on it."""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

from spool.deploy.cluster.local_ray import own_ray_environment
from spool.deploy.cluster.served_state import StateFolder
from spool.deploy.errors import RunError
from spool.engine.errors import one_line, with_remedy

_CALL_SECONDS = 10.0
_CONNECT_SECONDS = 5.0


@contextmanager
def connected(address: str, own: StateFolder | None) -> Iterator[None]:
    """Joins Ray for the length of the block; `own` where it is Spool's. Raises RunError."""
    if own is not None:
        os.environ.update(own_ray_environment(own))
    _check_listening(address)
    import ray
    import ray.serve  # sets up its logger

    # What Ray and Serve tell the terminal is not for users of Spool; errors reach them as exceptions.
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        ray.init(
            address=address, namespace="spool", log_to_driver=False, configure_logging=False, logging_level="ERROR"
        )
    except Exception as error:  # Ray's errors have no common ancestor
        raise RunError(f"Ray at {address} cannot be joined: {_why_not_joined(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_listening(address: str) -> None:
    """Ray itself takes minutes to find that nobody is there."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise RunError(f"Ray at {address} cannot be joined: {error.strerror or error}") from error


def ray_log_folder() -> str:
    """Where the Ray joined keeps the logs of this machine's processes."""
    from ray._private.worker import global_worker

    folder: str = global_worker.node.get_logs_dir_path()
    return folder


def serve_client() -> Any:
    """Of Ray Serve on the Ray joined; None where it does not run."""
    from ray.serve.context import _get_global_client

    return _get_global_client(raise_if_no_controller_running=False)


def stop_application(app_name: str, started_serve: bool) -> None:
    """Takes the application down, and Serve with it where that was started for it and nobody else uses it."""
    from ray import serve

    if serve_client() is None:
        return
    serve.delete(app_name)
    if started_serve and not serve.status().applications:
        serve.shutdown()


def application_state(app_name: str) -> dict[str, Any]:
    """What Serve says of the application, as plain data: `status` (NOT_STARTED where Serve does not know it),
    `message`, and by name `deployments`, each with `status`, `message` and the numbers of `replicas` by state."""
    client = serve_client()
    # `serve.status()` says the same, and takes 20 ms of CPU for it.
    application = client.get_serve_details()["applications"].get(app_name) if client is not None else None
    if application is None:
        return {"status": "NOT_STARTED", "message": "", "deployments": {}}
    deployments = {
        name: {
            "status": _plain(one["status"]),
            "replicas": dict(Counter(_plain(replica["state"]) for replica in one["replicas"])),
            "message": one["message"],
        }
        for name, one in application["deployments"].items()
    }
    return {"status": _plain(application["status"]), "message": application["message"], "deployments": deployments}


def _plain(state: Enum | str) -> str:
    return str(state.value if isinstance(state, Enum) else state)


def gateway_nodes(app_name: str) -> tuple[str, list[str]]:
    """Addresses of this process's node, and of those with a gateway that is up."""
    from ray.util import get_node_ip_address

    from spool.deploy.ray_app import GATEWAY

    replicas = serve_client().get_serve_details()["applications"][app_name]["deployments"][GATEWAY]["replicas"]
    return get_node_ip_address(), [one["node_ip"] for one in replicas if one["state"] == "RUNNING"]


def scheduler_statuses(app_name: str, application: Mapping[str, Any]) -> list[dict[str, Any] | None]:
    """What each cell's scheduler says of itself and its workers; None while there is none to ask.

    An application that Serve has not built yet counts as one cell.
    """
    from spool.deploy.ray_app import scheduler_name

    names = (scheduler_name(cell) for cell in itertools.count(1))
    found = list(itertools.takewhile(application["deployments"].__contains__, names))
    return [_scheduler_status(app_name, name) for name in found] or [None]


def _scheduler_status(app_name: str, deployment: str) -> dict[str, Any] | None:
    from ray import serve

    try:
        handle = serve.get_deployment_handle(deployment, app_name=app_name)
        status: dict[str, Any] = handle.status.remote().result(timeout_s=_CALL_SECONDS)
    except Exception:  # Serve's and Ray's errors have no common ancestor
        logging.getLogger(__name__).debug("the scheduler did not answer", exc_info=True)
        return None
    return status


def _why_not_joined(error: BaseException) -> str:
    if "version mismatch" not in str(error).lower():
        return first_line(error)
    return f"{one_line(error)} (install the cluster's versions here, or unset ray.address for a Ray of Spool's own)"


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def reason_of_failure(message: str) -> str:
    """The one line of Serve's message, with its tracebacks, that says why a replica does not start."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception")) and ": " in line]
    return with_remedy(errors[-1] if errors else lines[0] if lines else "no reason is known")
