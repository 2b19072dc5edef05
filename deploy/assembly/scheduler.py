"""The scheduler that a configuration describes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

from spool.deploy.assembly.tracing import sequence_tracing
from spool.deploy.config.spool_config import SpoolConfig
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.scheduler.epochs import EpochAuthority, EpochRegister
from spool.services.scheduler.metrics_endpoint import MetricsEndpoint
from spool.services.scheduler.server import SchedulerServer, SchedulerServerOptions
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler.status import ReplicaFigures
from spool.services.scheduler.workers.worker_link import LinkOptions


async def start_scheduler(
    config: SpoolConfig,
    register: EpochRegister,
    security: ChannelSecurity,
    running: AsyncExitStack,
    host: str,
    *,
    port: int = 0,
    cell: int = 1,
    replicas: Callable[[], ReplicaFigures | None] = lambda: None,
    stop_seconds: float,
) -> tuple[SchedulerService, SchedulerServer, str]:
    """Numbered by `register`, with its metrics; also gives its address. All ends when `running` closes."""
    epochs = EpochAuthority(register)
    service = SchedulerService(
        config.scheduler_config(),
        scheduler_epoch=await epochs.claim(),
        epochs=epochs,
        link_options=LinkOptions(
            step_timeout=config.scheduling.step_timeout_seconds,
            silence_timeout=config.scheduling.silence_timeout_seconds,
        ),
        security=security,
        observers=sequence_tracing(config.tracing, running),
    )
    running.push_async_callback(service.close)
    options = SchedulerServerOptions(vllm_model_name=config.served_name)
    server = SchedulerServer(service, host, port, security=security, options=options, replicas=replicas)
    address = await server.start()
    running.push_async_callback(server.stop, stop_seconds)
    if (listen := config.metrics.listen(cell)) is not None:
        await running.enter_async_context(MetricsEndpoint(server.metric_families, *listen))
    return service, server, address
