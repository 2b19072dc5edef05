"""What the gRPC servers of target and draft workers have in common."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

from spool.protos import worker_pb2, worker_pb2_grpc
from spool.services.rpc.call_guards import guards
from spool.services.rpc.channel_options import MAX_MESSAGE_BYTES, WORKER_SERVER_OPTIONS
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.rpc.protocol_version import SPOKEN, version_conflict
from spool.services.worker.step_streams import Steps, StepStreams

logger = logging.getLogger(__name__)

SERVICE_NAME = "spool.worker.v1.Worker"
_LONGEST_SECONDS = 600.0


def step_thread() -> ThreadPoolExecutor:
    """The one thread of a worker that computes.

    The engine must be loaded on this thread as well: OpenMP keeps a team of threads for each thread that has computed.
    With more such threads than cores, they wait for one another longer than a second core saves.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")


class BaseWorkerServer(worker_pb2_grpc.WorkerServicer):
    """Serves a worker and grpc.health.v1 on `host`:`port` (0: a free port).

    `steps` answers the steps of schedulers. `thread`, a `step_thread()`, ends with the server. `security` says who may
    call; health checks need no token. `start` returns the address. `stop` waits for what has arrived, at most for the
    grace given.
    """

    max_receive_bytes = MAX_MESSAGE_BYTES
    """Of one message."""

    def __init__(
        self, steps: Steps, host: str, port: int, thread: ThreadPoolExecutor, security: ChannelSecurity | None
    ) -> None:
        self._host = host
        self._port = port
        self._thread = thread
        self._security = security or ChannelSecurity()
        self._health = health_aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self.streams = StepStreams(steps)

    @property
    @abstractmethod
    def highest_epoch(self) -> int:
        """The highest scheduler epoch that ever spoke; 0 before the first."""

    @property
    @abstractmethod
    def sequences(self) -> int: ...

    @abstractmethod
    def running_seconds(self) -> float | None:
        """How long the worker has been computing; None where it does not."""

    @property
    def busy(self) -> bool:
        return self.running_seconds() is not None

    def check_health(self) -> None:
        """Raises RuntimeError when the thread that computes hangs."""
        seconds = self.running_seconds()
        if seconds is not None and seconds > _LONGEST_SECONDS:
            raise RuntimeError(f"a step has been running for {seconds:.0f} s, the limit is {_LONGEST_SECONDS:g} s")

    @abstractmethod
    def describe(self) -> worker_pb2.WorkerDescription: ...

    @abstractmethod
    def refuse_new(self) -> None:
        """Lets nobody in any more."""

    @abstractmethod
    async def wait_empty(self) -> None:
        """Waits until nobody uses the worker."""

    def load(self) -> tuple[float, int]:
        """Of a draft worker, the seconds that it has computed for since its start, and the sequences that wait for it;
        a target's are known from its steps."""
        return 0.0, 0

    async def start(self) -> str:
        """Raises OSError if the port cannot be bound, and InsecureListenError for a host open to strangers."""
        options = {**dict(WORKER_SERVER_OPTIONS), "grpc.max_receive_message_length": self.max_receive_bytes}
        server = grpc.aio.server(options=[*options.items()], interceptors=guards(self._security))
        self.add_to(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        address = self._security.listen(server, self._host, self._port)
        await server.start()
        self._server = server
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return address

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)

    async def stop(self, grace_seconds: float) -> None:
        await self._health.enter_graceful_shutdown()
        self.streams.end()
        if self._server is not None:
            await self._server.stop(grace_seconds)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def Describe(  # noqa: N802
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerDescription:
        conflict = version_conflict("the scheduler", request, "this worker", SPOKEN)
        if conflict is not None:
            logger.error("%s", conflict)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, conflict)
        return self.describe()

    async def Steps(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.StepRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.StepReply]:
        async with aclosing(self.streams.run(request_iterator)) as replies:
            async for reply in replies:
                yield reply

    async def drain(self, timeout_seconds: float | None) -> int:
        """Lets nobody in any more, and waits until nobody is left or the time is over. Returns how many sequences are
        left."""
        self.refuse_new()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.wait_empty()
        except TimeoutError:
            logger.warning("drain: %d sequences are left at the deadline", self.sequences)
        return self.sequences

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", SERVICE_NAME):
            await self._health.set(service, status)
