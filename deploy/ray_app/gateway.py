"""The HTTP and gRPC ingress as a Serve replica."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from ray import serve
from ray.serve.handle import DeploymentHandle

from spool.deploy.assembly.gateway import start_gateway
from spool.deploy.assembly.secrets import channel_security
from spool.deploy.autoscaling.policy import OPEN_REQUESTS
from spool.deploy.cluster.client import application_state
from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.ray_app import GATEWAY
from spool.deploy.ray_app.ray_metrics import RayMirror
from spool.deploy.ray_app.replica import SchedulerAddress, keep_serve_on_node
from spool.services.launch.process_tuning import keep_loaded_objects

logger = logging.getLogger(__name__)

# In which load balancers ask twice for /-/healthz, and Serve begins to start a successor.
_NOTICE_SECONDS = 5.0
_LOOK_SECONDS = 0.5


class Gateway:
    """Serves OpenAI's API and gRPC on ports of its own, as without Ray: none of Serve's proxies stands before them.

    Replicas on one node share the ports: the kernel spreads connections over them.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: SpoolConfig, schedulers: Sequence[DeploymentHandle], workers: Sequence[DeploymentHandle]
    ) -> None:
        """`workers` are only tied to the application here."""
        config.logging.install()
        keep_serve_on_node()
        self._drain_seconds = config.gateway.drain_seconds
        self._running = AsyncExitStack()
        self._engine, _ = await start_gateway(
            config,
            [SchedulerAddress(scheduler) for scheduler in schedulers],
            gateway_id=serve.get_replica_context().replica_id.unique_id,
            security=channel_security(config.internal),
            drain_seconds=lambda: config.gateway.drain_seconds,
            share_port=True,
            running=self._running,
        )
        await self._running.enter_async_context(RayMirror(self._engine.metrics.families))
        keep_loaded_objects()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this every few seconds, and gives the answers of all replicas to the policy."""
        return {OPEN_REQUESTS: float(self._engine.open_requests)}

    async def check_health(self) -> None:
        """Serve replaces the replica where this raises."""
        self._engine.backend.check_health()

    async def __del__(self) -> None:
        """Serve awaits this when the replica is to go: other gateways get new connections, and open requests end."""
        self._engine.leaving = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds / 2):
                await self._until_others_serve()
        await self._running.aclose()

    async def _until_others_serve(self) -> None:
        """Returns when no gateway of the application is starting and load balancers know; at once if all of it ends."""
        app_name, noticed = serve.get_replica_context().app_name, time.monotonic() + _NOTICE_SECONDS
        starting = 1
        while starting or time.monotonic() < noticed:
            try:
                state = await asyncio.to_thread(application_state, app_name)
            except Exception:  # Ray's errors have no common ancestor
                logger.debug("Serve does not answer", exc_info=True)
                return
            if state["status"] in ("NOT_STARTED", "DELETING"):
                return
            starting = state["deployments"].get(GATEWAY, {"replicas": {}})["replicas"].get("STARTING", 0)
            await asyncio.sleep(_LOOK_SECONDS)
