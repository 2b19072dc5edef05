"""The Ray Serve application."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from ray import serve
from ray.serve import Application

from spool.deploy.config.ingress import GatewaySettings
from spool.deploy.config.loading import configuration_from
from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.ray_app import GATEWAY, scheduler_name, workers_name
from spool.deploy.ray_app.gateway import Gateway
from spool.deploy.ray_app.gpus import gpus_per_replica
from spool.deploy.ray_app.scheduler import Scheduler
from spool.deploy.ray_app.worker import WorkerReplica
from spool.scheduler.messages import Role
from spool.services.launch.process_tuning import compute_environment
from spool.services.rpc.channel_security import random_token

logger = logging.getLogger(__name__)

# Every gateway and worker may ask at once; none of these calls takes long.
_SCHEDULER_CALLS = 10_000

# A worker that does not start twice will not the third time, and each time costs a loading of weights.
_START_ATTEMPTS = 2

# For a gateway whose requests have ended.
_END_SECONDS = 5.0

# Serve replaces a replica that missed this limit three times in a row: not one whose host is cut off for half a minute.
_HEALTH = {"health_check_period_s": 1.0, "health_check_timeout_s": 20.0}
# While the scheduler hangs nothing goes on, and gateways wait for 40 s at most.
_SCHEDULER_HEALTH = {"health_check_period_s": 1.0, "health_check_timeout_s": 3.0}

# The scheduler is asked for its address by every worker, every second.
_QUIET = {"logging_config": {"enable_access_log": False}}


def build(args: dict[str, Any]) -> Application:
    """The application of a configuration, whose content is the argument `settings` (`spool config render`)."""
    return application(configuration_from(args["settings"]))


def application(config: SpoolConfig) -> Application:
    """All deployments, tied together by the gateway, through which Serve sees them as one application.

    Numbers of replicas are fixed here, which spares Serve a tenth of what it takes when idle; a file for `serve deploy`
    replaces them by ranges.
    """
    if not config.internal.chosen:
        internal = config.internal.model_copy(update={"token": SecretStr(random_token())})
        config = config.model_copy(update={"internal": internal})
    config = settled(config)
    inner = config.without_client_keys()
    schedulers = {cell: _scheduler(config, cell).bind(inner, cell) for cell in config.groups.cell_numbers}
    workers = [
        _worker(config, role, cell).bind(inner, role, scheduler)
        for cell, scheduler in schedulers.items()
        for role in config.roles
    ]
    return _gateway(config.gateway).bind(config, list(schedulers.values()), workers)


def settled(config: SpoolConfig) -> SpoolConfig:
    """What depends on this process and on the Ray that it has joined, and paths, are written down for the replicas."""
    gpus = gpus_per_replica(config)
    groups = {}
    for role in config.roles:
        group = config.group(role)
        groups[role.value] = group.model_copy(update={"threads": config.threads(role), "num_gpus": gpus[role]})
    return _with_paths_found(config.model_copy(update={"groups": config.groups.model_copy(update=groups)}))


def _with_paths_found(config: SpoolConfig) -> SpoolConfig:
    """Replicas have other working directories than this process, from which paths of models are meant."""
    named = {"target": config.models.target, "draft": config.models.draft}
    found = {field: str(Path(name).absolute()) for field, name in named.items() if name and _is_path(name)}
    if config.models.served_model_name is None:
        found["served_model_name"] = config.served_name
    return config.model_copy(update={"models": config.models.model_copy(update=found)})


def _is_path(model: str) -> bool:
    return Path(model).is_dir() or model.endswith(".gguf")


def _scheduler(config: SpoolConfig, cell: int) -> serve.Deployment:
    return serve.deployment(Scheduler).options(
        name=scheduler_name(cell),
        num_replicas=1,
        ray_actor_options=config.scheduler.actor_options(),
        max_ongoing_requests=_SCHEDULER_CALLS,
        graceful_shutdown_timeout_s=5.0,
        **_QUIET,
        **_SCHEDULER_HEALTH,
    )


def _worker(config: SpoolConfig, role: Role, cell: int) -> serve.Deployment:
    group = config.group(role)
    return serve.deployment(WorkerReplica).options(
        name=workers_name(role, cell),
        ray_actor_options=_worker_options(config, role),
        graceful_shutdown_timeout_s=group.drain_seconds,
        max_constructor_retry_count=_START_ATTEMPTS,
        graceful_shutdown_wait_loop_s=0.1,
        num_replicas=group.replicas,
        **_HEALTH,
    )


def _worker_options(config: SpoolConfig, role: Role) -> dict[str, Any]:
    group = config.group(role)
    options = group.actor_options()
    options["num_gpus"] = group.num_gpus or 0.0
    variables = compute_environment(config.threads(role), config.engine.cpu_isa)
    options["runtime_env"] = {"env_vars": variables | group.environment}
    return options


def _gateway(gateway: GatewaySettings) -> serve.Deployment:
    return serve.deployment(Gateway).options(
        name=GATEWAY,
        ray_actor_options=gateway.actor_options(),
        graceful_shutdown_timeout_s=gateway.leave_seconds + _END_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        num_replicas=gateway.replicas,
        **_HEALTH,
    )
