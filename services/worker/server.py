"""The gRPC server of a target: steps run in order on a thread of their own, so the event loop always answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio

from spool.protos import worker_pb2
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.rpc.protocol_version import SOFTWARE_VERSION, SPOKEN
from spool.services.worker.base_server import BaseWorkerServer, step_thread
from spool.services.worker.executor import StepExecutor
from spool.services.worker.kv_fetch import import_kv
from spool.services.worker.kv_pages import KvTransferError
from spool.services.worker.queue import StepQueue


class WorkerServer(BaseWorkerServer):
    """Serves one step executor, whose steps run on `thread`."""

    def __init__(
        self,
        executor: StepExecutor,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        thread: ThreadPoolExecutor | None = None,
        security: ChannelSecurity | None = None,
    ) -> None:
        thread = thread or step_thread()
        self._executor = executor
        self._steps = StepQueue(executor, thread)
        super().__init__(self._steps, host, port, thread, security)

    @property
    def highest_epoch(self) -> int:
        return self._executor.scheduler_epoch

    @property
    def sequences(self) -> int:
        return self._executor.sequences

    def describe(self) -> worker_pb2.WorkerDescription:
        description = self._executor.describe()
        description.protocol_version, description.oldest_protocol_version = SPOKEN.newest, SPOKEN.oldest
        description.version = SOFTWARE_VERSION
        return description

    def running_seconds(self) -> float | None:
        return self._steps.running_seconds()

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

    def refuse_new(self) -> None:
        self._executor.draining = True

    async def wait_empty(self) -> None:
        """Waits until the worker holds no sequence."""
        while self._executor.sequences:
            self._steps.step_ended.clear()
            await self._steps.step_ended.wait()
