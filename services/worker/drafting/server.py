"""The gRPC server of one draft worker."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import grpc.aio

from spool.engine.drafting.model_drafting import Draft, ModelDrafting
from spool.protos import draft_pb2_grpc, worker_pb2
from spool.scheduler.messages import Role
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.rpc.conversion import to_wire
from spool.services.rpc.protocol_version import SOFTWARE_VERSION, SPOKEN
from spool.services.rpc.worker_codec import ROLES
from spool.services.worker.base_server import BaseWorkerServer, step_thread
from spool.services.worker.drafting.batcher import Batcher
from spool.services.worker.drafting.limits import MAX_FRAME_BYTES
from spool.services.worker.drafting.service import DrafterService
from spool.services.worker.drafting.signs_of_life import SignsOfLife


class DraftServer(BaseWorkerServer):
    """Serves the model `draft` to targets, on `thread`. `worker_epoch` must differ between two starts of a worker."""

    max_receive_bytes = MAX_FRAME_BYTES

    def __init__(
        self,
        draft: Draft,
        prefix_cache: bool = True,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        worker_epoch: int | None = None,
        thread: ThreadPoolExecutor | None = None,
        security: ChannelSecurity | None = None,
        ahead: bool = False,
    ) -> None:
        """`ahead`: the draft computes while targets do, on another device than theirs."""
        thread = thread or step_thread()
        self.worker_epoch = time.time_ns() if worker_epoch is None else worker_epoch
        self._draft = draft
        self._batcher = Batcher(ModelDrafting(draft, prefix_cache), draft.pool, thread, ahead)
        self._drafter = DrafterService(self._batcher, self.worker_epoch, draft.description.vocabulary_size)
        self._signs = SignsOfLife(self.worker_epoch, thread, lambda: draft.pool.free_pages)
        super().__init__(self._signs, host, port, thread, security)

    @property
    def highest_epoch(self) -> int:
        return self._signs.scheduler_epoch

    @property
    def sequences(self) -> int:
        return self._batcher.sequences if self._drafter.streams else 0

    def running_seconds(self) -> float | None:
        return self._batcher.running_seconds()

    def load(self) -> tuple[float, int]:
        return self._batcher.busy_seconds, self._batcher.queued

    def describe(self) -> worker_pb2.WorkerDescription:
        return to_wire(
            worker_pb2.WorkerDescription,
            self._draft.description,
            role=ROLES.to_wire(Role.DRAFT),
            worker_epoch=self.worker_epoch,
            free_pages=self._draft.pool.free_pages,
            process_id=os.getpid(),
            protocol_version=SPOKEN.newest,
            oldest_protocol_version=SPOKEN.oldest,
            version=SOFTWARE_VERSION,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        super().add_to(server)
        draft_pb2_grpc.add_DrafterServicer_to_server(self._drafter, server)

    async def start(self) -> str:
        address = await super().start()
        if not self._security.tls:
            # With TLS, all goes by gRPC: Python's TLS sockets must not be read and written to at the same time.
            await self._drafter.listen(self._host)
        return address

    async def stop(self, grace_seconds: float) -> None:
        self.refuse_new()
        await super().stop(grace_seconds)

    def refuse_new(self) -> None:
        """Whoever has a stream now has nothing to ask, since its scheduler has given it another draft, or has none."""
        self._signs.draining = True
        self._drafter.dismiss()

    async def wait_empty(self) -> None:
        """Returns at once: `refuse_new` has ended all streams."""
