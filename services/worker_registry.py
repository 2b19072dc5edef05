"""The workers that have announced themselves to a scheduler, and what became of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from protos import worker_pb2
from services.pairing import PairingError
from services.scheduler_service import SchedulerService, ServiceClosedError
from services.worker_link import WorkerEndpoint, WorkerUnreachableError

logger = logging.getLogger(__name__)


class WorkerState(Enum):
    CONNECTING = "connecting"
    IN_USE = "in use"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """Times in seconds. A worker that was refused or not reached is tried again when it registers after
    `retry_seconds`; one that is down and has not registered for `forget_seconds` is forgotten. A call to register is
    answered after `answer_seconds` even if the connection is not made yet.
    """

    retry_seconds: float = 2.0
    forget_seconds: float = 15.0
    answer_seconds: float = 2.0

    def __post_init__(self) -> None:
        for name in ("retry_seconds", "forget_seconds", "answer_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be above 0")


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker as it stands. `reason` says why it is not in use, and is empty where it is."""

    endpoint: WorkerEndpoint
    description: worker_pb2.WorkerDescription
    state: WorkerState
    reason: str


@dataclass(slots=True)
class _Entry:
    endpoint: WorkerEndpoint
    description: worker_pb2.WorkerDescription
    heard: float
    state: WorkerState = WorkerState.CONNECTING
    reason: str = ""
    tried: float = 0.0
    attempt: asyncio.Task[None] | None = None
    draining: bool = False


class WorkerRegistry:
    """Adds workers to a scheduler service as they register, and removes those that left or are gone for good.

    A worker is the same as before when it has its id, address, role and worker epoch; another with its id takes its
    place. `sweep` is to be called now and then. Times are those of `clock`, monotonic seconds.
    """

    def __init__(self, service: SchedulerService, options: RegistryOptions, clock: Callable[[], float]) -> None:
        self._service = service
        self._options = options
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    async def register(self, endpoint: WorkerEndpoint, description: worker_pb2.WorkerDescription) -> WorkerRecord:
        """Takes notice of a worker. Raises ServiceClosedError."""
        if self._service.closed_because is not None:
            raise ServiceClosedError(self._service.closed_because)
        now = self._clock()
        entry = self._entries.get(endpoint.worker_id)
        if entry is None or entry.endpoint != endpoint or entry.description.worker_epoch != description.worker_epoch:
            old, entry = entry, _Entry(endpoint, description, now)
            self._entries[endpoint.worker_id] = entry
            self._try(entry, old)
        entry.heard, entry.description = now, description
        self._refresh(entry)
        if entry.state in (WorkerState.REFUSED, WorkerState.UNREACHABLE):
            self._try_again(entry, now)
        if entry.attempt is not None:
            await asyncio.wait({entry.attempt}, timeout=self._options.answer_seconds)
            self._refresh(entry)
        return _record(entry)

    async def deregister(self, worker_id: str, worker_epoch: int, drain_seconds: float) -> None:
        """Lets a worker go; returns when it has been told to drop its sequences. An unknown one is no error.

        Its sequences have so many seconds to leave with their KV.
        """
        entry = self._entries.get(worker_id)
        if entry is None or entry.description.worker_epoch != worker_epoch:
            return
        entry.state, entry.reason = WorkerState.LEAVING, "it asked to be removed"
        await _stop(entry)
        entry.draining = True
        try:
            await self._service.remove_worker(worker_id, drain_seconds)
        finally:
            entry.draining, entry.heard = False, self._clock()

    def records(self) -> Iterator[WorkerRecord]:
        """Of every worker that is known, in the order in which they came."""
        for entry in self._entries.values():
            self._refresh(entry)
            yield _record(entry)

    async def sweep(self) -> None:
        """Forgets workers that are not in use and have not been heard of for long."""
        oldest = self._clock() - self._options.forget_seconds
        for worker_id, entry in list(self._entries.items()):
            self._refresh(entry)
            if entry.heard < oldest and entry.state is not WorkerState.IN_USE and not entry.draining:
                logger.info("worker %s is forgotten: %s", worker_id, entry.reason or entry.state.value)
                del self._entries[worker_id]
                await _stop(entry)
                await self._service.workers.remove(worker_id, dismiss=False)

    async def close(self) -> None:
        for entry in self._entries.values():
            await _stop(entry)

    def _try_again(self, entry: _Entry, now: float) -> None:
        if entry.attempt is not None or now - entry.tried < self._options.retry_seconds:
            return
        if entry.endpoint.worker_id in self._service.workers.endpoints:
            entry.tried = now
            self._service.workers.retry(entry.endpoint.worker_id)
        else:
            self._try(entry, None)

    def _try(self, entry: _Entry, old: _Entry | None) -> None:
        """Starts an attempt; what the last one came to stands until this one has ended."""
        entry.tried = self._clock()
        entry.attempt = asyncio.create_task(self._add(entry, old))

    async def _add(self, entry: _Entry, old: _Entry | None) -> None:
        if old is not None:
            await _stop(old)
            await self._service.workers.remove(entry.endpoint.worker_id, dismiss=False)
        try:
            await self._service.workers.add([entry.endpoint])
        except PairingError as error:
            logger.error("%s", error)
            entry.state, entry.reason = WorkerState.REFUSED, str(error)
        except (WorkerUnreachableError, ServiceClosedError, OSError) as error:
            logger.warning("%s", error)
            entry.state, entry.reason = WorkerState.UNREACHABLE, str(error)
        except Exception as error:
            logger.exception("worker %s could not be added", entry.endpoint.worker_id)
            entry.state, entry.reason = WorkerState.UNREACHABLE, f"{type(error).__name__}: {error}"
        finally:
            entry.attempt = None

    def _refresh(self, entry: _Entry) -> None:
        """Brings the state up to date with the worker's link, once there is one."""
        if entry.attempt is not None or entry.state is WorkerState.LEAVING:
            return
        worker_id = entry.endpoint.worker_id
        if worker_id in self._service.workers.up:
            entry.state, entry.reason = WorkerState.IN_USE, ""
        elif worker_id in self._service.workers.endpoints:
            entry.state, entry.reason = WorkerState.UNREACHABLE, self._service.workers.trouble_of(worker_id)


async def _stop(entry: _Entry) -> None:
    if entry.attempt is not None:
        entry.attempt.cancel()
        await asyncio.gather(entry.attempt, return_exceptions=True)


def _record(entry: _Entry) -> WorkerRecord:
    return WorkerRecord(entry.endpoint, entry.description, entry.state, entry.reason)
