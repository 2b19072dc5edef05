"""The HTTP and gRPC ingress as a Serve replica."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from ray import serve
from ray.serve.handle import DeploymentHandle

from deploy.assembly.gateway import start_gateway
from deploy.assembly.secrets import channel_security
from deploy.autoscaling.policy import OPEN_REQUESTS
from deploy.config.spool_config import SpoolConfig
from deploy.ray_app.ray_metrics import RayMirror
from deploy.ray_app.replica import SchedulerAddress, keep_serve_on_node
from services.launch.process_tuning import keep_loaded_objects


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
        await self._running.aclose()
