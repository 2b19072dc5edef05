"""The gRPC server of one worker: steps run in order on a thread of their own, so the event loop always answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

from protos import worker_pb2, worker_pb2_grpc
from services.rpc.call_guards import guards
from services.rpc.channel_options import WORKER_SERVER_OPTIONS
from services.rpc.channel_security import ChannelSecurity
from services.rpc.protocol_version import PROTOCOL_VERSION, version_conflict
from services.worker.executor import StepExecutor
from services.worker.kv_fetch import import_kv
from services.worker.kv_pages import KvTransferError
from services.worker.queue import StepQueue
from services.worker.step_streams import StepStreams

logger = logging.getLogger(__name__)

SERVICE_NAME = "spool.v1.Worker"


def step_thread() -> ThreadPoolExecutor:
    """The one thread of a worker that computes.

    The engine must be loaded on this thread as well: OpenMP keeps a team of threads for each thread that has computed.
    With more such threads than cores, they wait for one another longer than a second core saves.
    """
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")


class WorkerServer(worker_pb2_grpc.WorkerServicer):
    """Serves one step executor and grpc.health.v1 on `host`:`port` (0: a free port).

    Steps run on `thread`, a `step_thread()`, which ends with the server. `security` says who may call; health checks
    need no token. `start` returns the address. `stop` waits for the steps that have arrived, at most for the grace
    given. `check_health` regards a step as hanging after `longest_step_seconds`.
    """

    def __init__(
        self,
        executor: StepExecutor[Any],
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        thread: ThreadPoolExecutor | None = None,
        security: ChannelSecurity | None = None,
        longest_step_seconds: float = 600.0,
    ) -> None:
        self._executor = executor
        self._host = host
        self._port = port
        self._security = security or ChannelSecurity()
        self._thread = thread or step_thread()
        self._health = health_aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._longest_step = longest_step_seconds
        self._steps = StepQueue(executor, self._thread)
        self.streams = StepStreams(self._steps)

    @property
    def highest_epoch(self) -> int:
        """The highest scheduler epoch that ever spoke; 0 before the first."""
        return self._executor.scheduler_epoch

    @property
    def sequences(self) -> int:
        return self._executor.sequences

    def describe(self) -> worker_pb2.WorkerDescription:
        description = self._executor.describe()
        description.protocol_version = PROTOCOL_VERSION
        return description

    def load(self) -> tuple[float, int]:
        """Of a draft worker, the seconds that it has computed for since its start, and the sequences that wait for it;
        a target's are known from its steps."""
        return 0.0, 0

    @property
    def busy(self) -> bool:
        """Whether a step is running."""
        return self._steps.running_seconds() is not None

    def check_health(self) -> None:
        """Raises RuntimeError when a step hangs, which blocks the engine's thread for good."""
        seconds = self._steps.running_seconds()
        if seconds is not None and seconds > self._longest_step:
            raise RuntimeError(f"a step has been running for {seconds:.0f} s, the limit is {self._longest_step:g} s")

    async def start(self) -> str:
        """Raises OSError if the port cannot be bound, and InsecureListenError for a host open to strangers."""
        server = grpc.aio.server(options=WORKER_SERVER_OPTIONS, interceptors=guards(self._security))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        address = self._security.listen(server, self._host, self._port)
        await server.start()
        self._server = server
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return address

    async def stop(self, grace_seconds: float) -> None:
        await self._health.enter_graceful_shutdown()
        self.streams.end()
        if self._server is not None:
            await self._server.stop(grace_seconds)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def Describe(  # noqa: N802
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerDescription:
        conflict = version_conflict("the scheduler", request.protocol_version, "this worker", PROTOCOL_VERSION)
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

    async def ExportKv(  # noqa: N802
        self, request: worker_pb2.ExportKvRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.KvPart]:
        transfer = self._executor.kv_transfer
        try:
            header: worker_pb2.KvHeader = await self._on_thread(transfer.header, request)
            yield worker_pb2.KvPart(header=header)
            first = 0
            while first < header.pages:
                pages: list[worker_pb2.KvPage] = await self._on_thread(transfer.read, request, first)
                for page in pages:
                    yield worker_pb2.KvPart(page=page)
                first += len(pages)
        except KvTransferError as error:
            await context.abort(grpc.StatusCode[error.code], str(error))

    async def ImportKv(  # noqa: N802
        self, request: worker_pb2.ImportKvRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ImportKvReply:
        began = self._executor.clock()
        if self._executor.draining:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the worker is draining and takes no sequences")
        try:
            size = await import_kv(
                request, self._executor.kv_transfer, self._on_thread, self._security, context.time_remaining()
            )
        except KvTransferError as error:
            await context.abort(grpc.StatusCode[error.code], str(error))
        return worker_pb2.ImportKvReply(bytes=size, seconds=max(self._executor.clock() - began, 0.0))

    def _on_thread(self, call: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Runs a call on the step thread, between two steps."""
        return asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    async def drain(self, timeout_seconds: float | None) -> int:
        """Refuses new sequences, and waits until none is left or the time is over. Returns how many are left."""
        self._executor.draining = True
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.wait_empty()
        except TimeoutError:
            logger.warning("drain: %d sequences are left at the deadline", self._executor.sequences)
        return self._executor.sequences

    async def wait_empty(self) -> None:
        """Waits until the worker holds no sequence."""
        while self._executor.sequences:
            self._steps.step_ended.clear()
            await self._steps.step_ended.wait()

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", SERVICE_NAME):
            await self._health.set(service, status)
