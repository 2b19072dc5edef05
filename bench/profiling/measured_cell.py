"""Requests that arrive at a real scheduler over real workers, and when their tokens come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from deploy.errors import RunError
from deploy.offline.cell import Cell
from deploy.planning.open_loop import RequestTimes
from protos import worker_pb2
from scheduler.config import SchedulerConfig
from scheduler.messages import Role
from services.backend.interface import GenerationRequest
from services.observability.observer import ServiceObserver
from services.rpc.worker_codec import ROLES
from services.scheduler.service import SchedulerService
from services.scheduler_client.local import LocalBackend


class MeasuredCell:
    """A target and a draft, and a scheduler for each load."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self.descriptions: dict[Role, worker_pb2.WorkerDescription] = {}
        """Of its workers, as they were at the last load."""

    async def run(
        self,
        config: SchedulerConfig,
        requests: Sequence[GenerationRequest],
        arrivals: Sequence[float],
        *observers: ServiceObserver,
    ) -> list[RequestTimes]:
        """When the tokens of each request came; seconds since the load began, as are the `arrivals`.

        Raises `RunError` if a worker is lost.
        """
        loss = _Loss()
        async with self._cell.service(config, drafting=True, observers=[loss, *observers]) as service:
            self.descriptions = {ROLES.from_wire(one.role): one for one in service.descriptions.values()}
            answered = asyncio.ensure_future(_answer_all(service, requests, arrivals))
            first: set[asyncio.Future[Any]] = {answered, loss.told}
            try:
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                if not answered.done():
                    raise RunError(f"worker {loss.told.result()} was lost")
                return answered.result()
            finally:
                answered.cancel()


class _Loss(ServiceObserver):
    """Waits for the first worker that is lost."""

    def __init__(self) -> None:
        self.told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def worker_lost(self, role: Role, worker_id: str, sequences: int) -> None:
        if not self.told.done():
            self.told.set_result(worker_id)


async def _answer_all(
    service: SchedulerService, requests: Sequence[GenerationRequest], arrivals: Sequence[float]
) -> list[RequestTimes]:
    backend, began = LocalBackend(service), time.perf_counter()

    async def one(request: GenerationRequest, arrival: float) -> RequestTimes:
        await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
        times = RequestTimes(arrival)
        async for delta in await backend.submit(request):
            times.last = time.perf_counter() - began
            times.first = times.first or times.last
            times.tokens += len(delta.tokens)
        return times

    return await asyncio.gather(*map(one, requests, arrivals))
