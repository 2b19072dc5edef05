"""The one scheduler as a Serve replica."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from deploy.autoscaling.reporter import Autoscaler
from deploy.autoscaling.rules import rules_from_plain
from deploy.deployments.plan import Plan, channel_security, internal_host
from deploy.deployments.ray_metrics import RayMirror
from deploy.deployments.traces import sequence_tracing
from deploy.plain_messages import plain_message
from services.garbage import keep_loaded_objects
from services.log_format import install_logs
from services.scheduler_families import scheduler_families
from services.scheduler_server import SchedulerServer
from services.scheduler_service import SchedulerService
from services.worker_link import LinkOptions


class Scheduler:
    """Runs the scheduler service on its node's address.

    Serve keeps one replica of it. One that hangs may live on for seconds beside its successor; the successor's epoch
    is higher, and the workers turn the old one away.
    """

    async def __init__(self, plan: Plan) -> None:  # type: ignore[misc]  # Serve awaits it
        config = plan.config
        install_logs(config.logging.format, config.logging.level.number)
        security = channel_security(config.internal)
        scheduler_config = config.scheduling.scheduler_config(config.models.drafts)
        self._autoscaler = Autoscaler(scheduler_config)
        self._running = AsyncExitStack()
        self._service = SchedulerService(
            scheduler_config,
            scheduler_epoch=time.time_ns(),
            link_options=LinkOptions(
                step_timeout=config.scheduling.step_timeout_seconds,
                silence_timeout=config.scheduling.silence_timeout_seconds,
            ),
            security=security,
            observers=sequence_tracing(config.tracing, self._running),
        )
        self._server = SchedulerServer(
            self._service,
            internal_host(config.internal),
            security=security,
            replicas=self._autoscaler.replica_figures,
        )
        self._address = await self._server.start()
        await self._running.enter_async_context(RayMirror(lambda: scheduler_families(self._server.status())))
        keep_loaded_objects()

    async def locate(self) -> str:
        """The address of the gRPC server."""
        return self._address

    async def status(self) -> dict[str, Any]:
        """What it knows of itself and its workers, and why there are so many, as plain data."""
        return plain_message(self._server.status()) | {"autoscaling": self._autoscaler.status()}

    def reconfigure(self, rules: Mapping[str, Any]) -> None:
        """Serve calls this with the rules of autoscaling, at the start and whenever they change."""
        self._autoscaler.set_rules(rules_from_plain(rules))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls this twice a second, and gives the answer to the policy (deploy/autoscaling/policy.py)."""
        return self._autoscaler.observe(self._service.core.snapshot(), self._service.statistics(), time.monotonic())

    async def check_health(self) -> None:
        """Serve replaces the replica where this raises: also one that another scheduler has taken over from."""
        self._server.check_health()

    async def __del__(self) -> None:
        await self._server.stop(1.0)
        await self._service.close()
        await self._running.aclose()
