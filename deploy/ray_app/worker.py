"""One draft or target worker as a Serve replica: it holds its Ray resources for as long as it serves."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict

from ray import serve
from ray.serve.handle import DeploymentHandle

from spool.deploy.assembly.secrets import channel_security
from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.ray_app.replica import SchedulerAddress, internal_host, keep_serve_on_node
from spool.deploy.workers import worker_engine
from spool.scheduler.errors import SpoolError
from spool.scheduler.messages import Role
from spool.services.launch.process_tuning import keep_loaded_objects
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.worker.base_server import step_thread
from spool.services.worker.process import WorkerArguments, load_worker
from spool.services.worker.registration import WorkerRegistration

logger = logging.getLogger(__name__)

# Of the time for draining: what stays for the steps still running and for Serve's own end of the replica.
_STOP_SECONDS = 2.0

_PATIENCE_SECONDS = 30.0
_REFUSED = "WORKER_STATE_REFUSED"


class WorkerRefusedError(SpoolError, RuntimeError):
    """The scheduler does not use the worker, and says why."""


class WorkerReplica:
    """Loads an engine, serves it over gRPC on the node's address, and keeps the scheduler informed."""

    async def __init__(self, config: SpoolConfig, role: Role, scheduler: DeploymentHandle) -> None:  # type: ignore[misc]  # Serve awaits it
        config.logging.install()
        keep_serve_on_node()
        self._drain_seconds = config.group(role).drain_seconds
        security = channel_security(config.internal)
        thread = step_thread()
        # On the thread, since planning the memory may fetch models.
        arguments = await asyncio.wrap_future(thread.submit(_arguments, config, role, security))
        start = await asyncio.wrap_future(thread.submit(load_worker, arguments, _log_progress))
        keep_loaded_objects()
        self._server = start(arguments, thread)
        address = await self._server.start()
        worker_id = f"{role.value}-{serve.get_replica_context().replica_id.unique_id}"
        resolve = SchedulerAddress(scheduler)
        self._registration = WorkerRegistration(worker_id, address, self._server, resolve, security=security)
        self._registration.start()
        await self._wait_in_use()

    async def _wait_in_use(self) -> None:
        """The replica counts as up when the scheduler uses it. Raises WorkerRefusedError.

        A refusal may pass: in an update, workers with another model go one by one.
        """
        while not self._registration.in_use:
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    await self._registration.wait_in_use()
            except TimeoutError:
                if self._registration.reason.startswith(_REFUSED):
                    raise WorkerRefusedError(self._registration.reason) from None
                logger.warning("not in use yet: %s", self._registration.reason)

    async def check_health(self) -> None:
        """Serve replaces the replica where this raises."""
        self._server.check_health()
        self._registration.check_health()

    async def __del__(self) -> None:
        """Serve awaits this when the replica is to go: its sequences go on elsewhere first."""
        await self._registration.leave(max(self._drain_seconds - _STOP_SECONDS, 0.0))
        await self._server.stop(_STOP_SECONDS)


def _arguments(config: SpoolConfig, role: Role, security: ChannelSecurity) -> WorkerArguments:
    # Ray shows a replica its own GPUs only, so the first is always the right one, and its ranks have one after the
    # other.
    device = "cuda:0" if config.group(role).num_gpus else "cpu"
    others = [other for other in config.roles if config.pair_shares_a_gpu and other is not role]
    engine = worker_engine(config, role, device, others, config.engine_of)
    return WorkerArguments(role, asdict(engine), internal_host(config.internal), security=security)


def _log_progress(message: str, fraction: float | None) -> None:
    logger.info("%s%s", message, "" if fraction is None else f" ({fraction:.0%})")
