"""Tokens a second of one stream at a time, through a real scheduler and real workers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.config import Policy, SchedulerConfig
from services.launch.launcher import WorkerLaunch, WorkerLauncher
from services.observability.observer import ServiceObserver
from services.rpc.channel_security import ChannelSecurity
from services.scheduler.epochs import EpochAuthority, MemoryRegister
from services.scheduler.service import SchedulerService
from services.scheduler.workers.worker_link import LinkOptions, WorkerEndpoint


@dataclass
class Streams:
    """What a configuration made of the prompts: the outputs, and figures of all but the first."""

    outputs: list[tuple[int, ...]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    sought: int = 0
    found: int = 0
    steps: int = 0
    step_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second, without the time to the first token."""
        return self.tokens / self.seconds

    @property
    def target_step(self) -> float:
        """Mean seconds of the target's steps."""
        return self.step_seconds / self.steps

    @property
    def share_found(self) -> float:
        """Of the verdicts, how many the draft had prepared for."""
        return self.found / max(1, self.sought)


async def one_at_a_time(
    launches: Sequence[WorkerLaunch],
    configs: Mapping[str, SchedulerConfig],
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    security: ChannelSecurity | None = None,
    observers: Sequence[ServiceObserver] = (),
) -> AsyncIterator[tuple[str, Streams]]:
    """Each configuration in turn, over the same workers. The first prompt is for learning what steps cost."""
    authority = EpochAuthority(MemoryRegister())
    links = LinkOptions(connect_timeout=60.0, step_timeout=600.0)
    async with WorkerLauncher(launches) as launcher:
        for name, config in configs.items():
            epoch = await authority.claim()
            async with SchedulerService(
                config, scheduler_epoch=epoch, link_options=links, security=security, observers=observers
            ) as service:
                workers = [WorkerEndpoint(one.worker_id, one.role, one.address) for one in launcher.workers]
                await service.workers.add(workers)
                streams = Streams()
                for place, prompt in enumerate(prompts):
                    await _stream(service, config, prompt, max_tokens, streams, counts=place > 0)
            yield name, streams


async def _stream(
    service: SchedulerService,
    config: SchedulerConfig,
    prompt: tuple[int, ...],
    max_tokens: int,
    streams: Streams,
    counts: bool,
) -> None:
    before, at_work = service.core.snapshot(), service.statistics()
    requested = None if config.policy is Policy.AUTO else config.draft_length
    output: list[int] = []
    first = began = 0.0
    async for delta in service.submit(prompt, max_tokens, draft_length=requested):
        if not output:
            first, began = len(delta.tokens), time.perf_counter()
        output += delta.tokens
    streams.outputs.append(tuple(output))
    if counts:
        after, worked = service.core.snapshot(), service.statistics()
        streams.steps += worked.target_steps - at_work.target_steps
        streams.step_seconds += worked.busy_seconds["target"] - at_work.busy_seconds["target"]
        streams.seconds += time.perf_counter() - began
        streams.tokens += len(output) - int(first)
        streams.sought += after.outcomes_sought - before.outcomes_sought
        streams.found += after.outcomes_found - before.outcomes_found
