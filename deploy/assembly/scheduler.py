"""The scheduler that a configuration describes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

from deploy.assembly.tracing import sequence_tracing
from deploy.config.spool_config import SpoolConfig
from services.rpc.channel_security import ChannelSecurity
from services.scheduler.epochs import EpochAuthority, EpochRegister
from services.scheduler.metrics_endpoint import MetricsEndpoint
from services.scheduler.server import SchedulerServer, SchedulerServerOptions
from services.scheduler.service import SchedulerService
from services.scheduler.status import ReplicaFigures
from services.scheduler.workers.worker_link import LinkOptions


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
    options = SchedulerServerOptions(vllm_model_name=config.vllm_model_name)
    server = SchedulerServer(service, host, port, security=security, options=options, replicas=replicas)
    address = await server.start()
    running.push_async_callback(server.stop, stop_seconds)
    if (listen := config.metrics.listen(cell)) is not None:
        await running.enter_async_context(MetricsEndpoint(server.metric_families, *listen))
    return service, server, address
