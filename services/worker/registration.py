"""Keeps a worker registered with the present scheduler of its cell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc.aio

from spool.protos import scheduler_pb2, scheduler_pb2_grpc
from spool.services.rpc.backoff import pause, require_positive
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.rpc.errors import reason_of
from spool.services.rpc.replies import readable
from spool.services.rpc.supervision import SupervisedTask
from spool.services.worker.base_server import BaseWorkerServer

logger = logging.getLogger(__name__)

# Of the time for leaving, what is kept for the worker to drop its last sequences: this part of it, at most so many
# seconds. Where no other worker gives the same bits, sequences come to their end in the rest.
_DROP_PART = 0.5
_MOST_DROP_SECONDS = 5.0

_KNOWN_STATES = frozenset(scheduler_pb2.WorkerState.values())


@dataclass(frozen=True, slots=True)
class RegistrationOptions:
    """Times in seconds. A worker in use registers every `interval`, one that is not every `retry_interval`.

    `call_timeout` bounds finding a scheduler's address and one call to it.
    """

    interval: float = 1.0
    retry_interval: float = 0.25
    call_timeout: float = 3.0

    def __post_init__(self) -> None:
        require_positive(self, "interval", "retry_interval", "call_timeout")


class WorkerRegistration:
    """Registers a worker with the scheduler that `resolve` names, again and again, from `start` to `leave` or `close`.

    The scheduler connects to `address`, where `server` listens. A scheduler that replaces another learns of the worker
    within the interval, or at once when the other's stream breaks. `worker_id` is unique in the cell.
    """

    def __init__(
        self,
        worker_id: str,
        address: str,
        server: BaseWorkerServer,
        resolve: Callable[[], Awaitable[str]],
        *,
        security: ChannelSecurity | None = None,
        options: RegistrationOptions | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._address = address
        self._server = server
        self._resolve = resolve
        self._security = security or ChannelSecurity()
        self._options = options or RegistrationOptions()
        self._channel: grpc.aio.Channel | None = None
        self._scheduler_address = ""
        self._run: SupervisedTask | None = None
        self._in_use = asyncio.Event()
        self.reason = "the worker has not registered yet"
        """Why the worker is not in use; empty where it is."""

    @property
    def in_use(self) -> bool:
        """Whether the scheduler's last answer said that it uses the worker."""
        return self._in_use.is_set()

    async def wait_in_use(self) -> None:
        await self._in_use.wait()

    def start(self) -> None:
        self._run = SupervisedTask(self._keep_registered(), "registration with the scheduler")

    async def close(self) -> None:
        """Stops registering, and does not tell the scheduler."""
        run, self._run = self._run, None
        if run is not None:
            await run.stop()
        await self._forget_channel()

    def check_health(self) -> None:
        """Raises RuntimeError once nothing keeps the worker registered any more."""
        if self._run is not None:
            self._run.check()

    async def leave(self, timeout_seconds: float) -> int:
        """Stops registering, has the scheduler move the worker's sequences elsewhere, or let them end, and waits until
        none is left.

        Takes no longer than the time given. Returns how many sequences are left; their scheduler will notice the
        worker's end.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_seconds
        run, self._run = self._run, None
        if run is not None:
            run.cancel()
            await asyncio.wait([run.task], timeout=timeout_seconds)
        self._not_in_use("the worker is leaving")
        let_go, seconds = False, timeout_seconds - min(timeout_seconds * _DROP_PART, _MOST_DROP_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                await self._deregister(seconds)
            let_go = True
        except TimeoutError:
            logger.warning("worker %s: the scheduler has not let go of it in time", self._worker_id)
        except Exception as error:  # noqa: BLE001
            # There may be no scheduler any more; the worker leaves anyway.
            logger.warning("worker %s was not deregistered: %s", self._worker_id, reason_of(error))
        # Without a scheduler that speaks to the worker, nobody tells it to drop its sequences.
        wait = let_go or self._server.streams.speaking_epoch
        left = await self._server.drain(max(end - loop.time(), 0.0) if wait else 0.0)
        await self._forget_channel()
        return left

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _keep_registered(self) -> None:
        hurry = self._server.streams.ended
        hurry.clear()
        while True:
            try:
                reply = await self._register()
            except Exception as error:  # noqa: BLE001
                # Whatever the resolver or a dying scheduler raised, the next attempt may find a scheduler.
                self._not_in_use(reason_of(error))
                await self._forget_channel()
            else:
                self._heed(reply)
            await pause(self._options.interval if self.in_use else self._options.retry_interval, hurry)

    async def _register(self) -> scheduler_pb2.RegisterReply:
        stub = await self._stub()
        busy_seconds, queued = self._server.load()
        request = scheduler_pb2.RegisterRequest(
            worker_id=self._worker_id,
            address=self._address,
            description=self._server.describe(),
            highest_scheduler_epoch=self._server.highest_epoch,
            busy_seconds=busy_seconds,
            queued=queued,
        )
        timeout = self._options.call_timeout
        return readable(await stub.Register(request, timeout=timeout, metadata=self._security.metadata))

    async def _deregister(self, timeout_seconds: float) -> None:
        stub = await self._stub()
        request = scheduler_pb2.DeregisterRequest(
            worker_id=self._worker_id, worker_epoch=self._server.describe().worker_epoch
        )
        await stub.Deregister(request, timeout=timeout_seconds, metadata=self._security.metadata)

    async def _stub(self) -> scheduler_pb2_grpc.SchedulerStub:
        async with asyncio.timeout(self._options.call_timeout):
            address = await self._resolve()
        if self._channel is None or address != self._scheduler_address:
            await self._forget_channel()
            self._channel = self._security.open_channel(address)
            self._scheduler_address = address
        return scheduler_pb2_grpc.SchedulerStub(self._channel)

    async def _forget_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    def _heed(self, reply: scheduler_pb2.RegisterReply) -> None:
        if reply.state == scheduler_pb2.WORKER_STATE_IN_USE:
            if not self.in_use:
                logger.info("worker %s is in use by scheduler %d", self._worker_id, reply.scheduler_epoch)
            self.reason = ""
            self._in_use.set()
        else:
            state = scheduler_pb2.WorkerState.Name(reply.state) if reply.state in _KNOWN_STATES else str(reply.state)
            self._not_in_use(f"{state}: {reply.reason}" if reply.reason else state)

    def _not_in_use(self, reason: str) -> None:
        if reason != self.reason:
            logger.warning("worker %s is not in use: %s", self._worker_id, reason)
        self.reason = reason
        self._in_use.clear()
