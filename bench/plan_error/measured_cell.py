"""Requests that arrive at a real scheduler, whose workers keep to a law of costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from deploy.planning.open_loop import RequestTimes
from deploy.planning.traffic import PlannedRequest
from scheduler.config import SchedulerConfig
from services.backend.interface import GenerationRequest
from services.launch.launcher import WorkerLauncher
from services.scheduler.epochs import EpochAuthority, MemoryRegister
from services.scheduler.service import SchedulerService
from services.scheduler.workers.worker_link import LinkOptions, WorkerEndpoint
from services.scheduler_client.local import LocalBackend


def prompts_of(requests: Sequence[PlannedRequest], load: int) -> list[tuple[int, ...]]:
    """A prompt's first token is the request's number, by which paced workers and virtual ones have the same luck. The
    others are those of the load: what workers have in their prefix caches from earlier loads must not be found."""
    return [(number, *(len(requests) + load,) * (request.prompt_tokens - 1)) for number, request in enumerate(requests)]


class MeasuredCell:
    """A real scheduler over paced workers."""

    def __init__(self, launcher: WorkerLauncher) -> None:
        self._launcher = launcher
        self._authority = EpochAuthority(MemoryRegister())
        self._loads = 0

    async def run(self, config: SchedulerConfig, requests: Sequence[PlannedRequest]) -> list[RequestTimes]:
        """When the tokens of each request came; seconds since the load began."""
        links = LinkOptions(connect_timeout=60.0, step_timeout=600.0)
        epoch = await self._authority.claim()
        self._loads += 1
        async with SchedulerService(config, scheduler_epoch=epoch, link_options=links) as service:
            await service.add_workers(
                [WorkerEndpoint(one.worker_id, one.role, one.address) for one in self._launcher.workers]
            )
            backend, began = LocalBackend(service), time.perf_counter()

            async def one(prompt: tuple[int, ...], request: PlannedRequest) -> RequestTimes:
                await asyncio.sleep(max(0.0, began + request.arrival - time.perf_counter()))
                times = RequestTimes(request.arrival)
                async for delta in await backend.submit(GenerationRequest(prompt, request.output_tokens)):
                    times.last = time.perf_counter() - began
                    times.first = times.first or times.last
                    times.tokens += len(delta.tokens)
                return times

            return await asyncio.gather(*map(one, prompts_of(requests, self._loads), requests))
