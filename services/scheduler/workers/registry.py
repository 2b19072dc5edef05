"""The workers that have registered with a scheduler, and the state of each."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from protos import worker_pb2
from services.rpc.backoff import require_positive
from services.scheduler.service import SchedulerService, ServiceClosedError
from services.scheduler.workers.pairing import PairingError
from services.scheduler.workers.worker_link import WorkerEndpoint, WorkerUnreachableError

logger = logging.getLogger(__name__)


class WorkerState(Enum):
    CONNECTING = "connecting"
    IN_USE = "in use"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """Times in seconds. A worker that was refused or not reached is tried again at its first registration that comes
    `retry_seconds` later. A worker that is down and has not registered for `forget_seconds` is forgotten. A
    registration is answered after `answer_seconds` at the latest, whether or not the connection has been made.
    """

    retry_seconds: float = 2.0
    forget_seconds: float = 15.0
    answer_seconds: float = 2.0

    def __post_init__(self) -> None:
        require_positive(self, "retry_seconds", "forget_seconds", "answer_seconds")


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker and its state. `reason` says why the worker is not in use; empty where it is."""

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
    left: int = 0
    """The epoch of the start that asked to be removed, if one did."""
    silent: bool = False
    """At the last sweep it was not in use, and had not registered for long."""


class WorkerRegistry:
    """Adds workers to a scheduler service as they register, and removes those that left or are gone for good.

    A registration with the same id, address and role comes from the same worker, perhaps from another start of it: the
    link finds out by itself to which it speaks. One with only the id in common replaces the worker. `sweep` is to be
    called now and then. `clock` gives monotonic seconds.
    """

    def __init__(self, service: SchedulerService, options: RegistryOptions, clock: Callable[[], float]) -> None:
        self._service = service
        self._options = options
        self._clock = clock
        self._entries: dict[str, _Entry] = {}

    async def register(self, endpoint: WorkerEndpoint, description: worker_pb2.WorkerDescription) -> WorkerRecord:
        """Handles one registration of a worker. Raises ServiceClosedError."""
        if self._service.closed_because is not None:
            raise ServiceClosedError(self._service.closed_because)
        now = self._clock()
        entry = self._entries.get(endpoint.worker_id)
        anew = entry is not None and entry.description.worker_epoch != description.worker_epoch
        # Another start than the one that left, and may have registered before that was heard of.
        back = entry is not None and entry.state is WorkerState.LEAVING and entry.left != description.worker_epoch
        if entry is None or entry.endpoint != endpoint or back:
            old, entry = entry, _Entry(endpoint, description, now)
            self._entries[endpoint.worker_id] = entry
            self._try(entry, old)
        elif anew:
            entry.tried = -math.inf
        entry.heard, entry.description = now, description
        self._refresh(entry)
        if entry.state in (WorkerState.REFUSED, WorkerState.UNREACHABLE):
            self._try_again(entry, now)
        if entry.attempt is not None:
            await asyncio.wait({entry.attempt}, timeout=self._options.answer_seconds)
            self._refresh(entry)
        return _record(entry)

    async def deregister(self, worker_id: str, worker_epoch: int, drain_seconds: float) -> None:
        """Removes a worker; returns when it has been told to drop its sequences. An unknown one is no error.

        The worker's sequences have `drain_seconds` to move to other workers with their KV.
        """
        entry = self._entries.get(worker_id)
        if entry is None or worker_epoch != self._epoch(entry):
            return
        entry.state, entry.reason, entry.left = WorkerState.LEAVING, "it asked to be removed", worker_epoch
        await _stop(entry)
        entry.draining = True
        try:
            await self._service.remove_worker(worker_id, drain_seconds)
        finally:
            entry.draining, entry.heard = False, self._clock()

    def records(self) -> Iterator[WorkerRecord]:
        """Every known worker, in the order of their first registrations."""
        for entry in self._entries.values():
            self._refresh(entry)
            yield _record(entry)

    async def sweep(self) -> None:
        """Forgets workers that are not in use and have not registered for `forget_seconds`, at this sweep and the last.

        A process that was stopped finds all workers silent at once. By the next sweep the links know more: perhaps that
        another scheduler has taken over.
        """
        oldest = self._clock() - self._options.forget_seconds
        for worker_id, entry in list(self._entries.items()):
            self._refresh(entry)
            before, entry.silent = entry.silent, entry.heard < oldest and entry.state is not WorkerState.IN_USE
            if before and entry.silent and not entry.draining:
                logger.info("worker %s is forgotten: %s", worker_id, entry.reason or entry.state.value)
                del self._entries[worker_id]
                await _stop(entry)
                await self._service.workers.remove(worker_id, dismiss=False)

    async def close(self) -> None:
        for entry in self._entries.values():
            await _stop(entry)

    def _epoch(self, entry: _Entry) -> int:
        """Of the start that the link speaks to or, without one that is up, of the start that registered last."""
        workers, worker_id = self._service.workers, entry.endpoint.worker_id
        up = workers.descriptions[worker_id] if worker_id in workers.up else entry.description
        return up.worker_epoch

    def _try_again(self, entry: _Entry, now: float) -> None:
        if entry.attempt is not None or now - entry.tried < self._options.retry_seconds:
            return
        if entry.endpoint.worker_id in self._service.workers.endpoints:
            entry.tried = now
            self._service.workers.retry(entry.endpoint.worker_id)
        else:
            self._try(entry, None)

    def _try(self, entry: _Entry, old: _Entry | None) -> None:
        """Starts an attempt to add the worker. State and reason of the last attempt stand until this one has ended."""
        entry.tried = self._clock()
        entry.attempt = asyncio.create_task(self._add(entry, old))

    async def _add(self, entry: _Entry, old: _Entry | None) -> None:
        if old is not None:
            await _stop(old)
            spoken_to = self._service.workers.descriptions.get(entry.endpoint.worker_id)
            died = spoken_to is not None and spoken_to.worker_epoch != entry.description.worker_epoch
            await self._service.workers.remove(entry.endpoint.worker_id, dismiss=False, died=died)
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
        """Updates the state from the worker's link, once there is one."""
        if entry.attempt is not None or entry.state is WorkerState.LEAVING:
            return
        worker_id, workers = entry.endpoint.worker_id, self._service.workers
        if worker_id not in workers.endpoints:
            return
        if worker_id not in workers.up:
            entry.state, entry.reason = WorkerState.UNREACHABLE, workers.trouble_of(worker_id)
        elif self._epoch(entry) != entry.description.worker_epoch:
            entry.state, entry.reason = WorkerState.UNREACHABLE, "the scheduler speaks to another start of it"
        else:
            entry.state, entry.reason = WorkerState.IN_USE, ""


async def _stop(entry: _Entry) -> None:
    if entry.attempt is not None:
        entry.attempt.cancel()
        await asyncio.gather(entry.attempt, return_exceptions=True)


def _record(entry: _Entry) -> WorkerRecord:
    return WorkerRecord(entry.endpoint, entry.description, entry.state, entry.reason)
