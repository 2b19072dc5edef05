"""The scheduler service that a configuration describes."""

from __future__ import annotations

from contextlib import AsyncExitStack

from deploy.assembly.tracing import sequence_tracing
from deploy.config.spool_config import SpoolConfig
from services.rpc.channel_security import ChannelSecurity
from services.scheduler.epochs import EpochAuthority, EpochRegister
from services.scheduler.service import SchedulerService
from services.scheduler.workers.worker_link import LinkOptions


async def scheduler_service(
    config: SpoolConfig, register: EpochRegister, security: ChannelSecurity, running: AsyncExitStack
) -> SchedulerService:
    """Numbered by `register`; traces that wait are sent when `running` closes. The caller closes the service."""
    epochs = EpochAuthority(register)
    return SchedulerService(
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
