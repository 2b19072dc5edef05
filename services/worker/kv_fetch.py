"""Fetches the KV of a sequence from another worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import grpc.aio

from spool.protos import worker_pb2, worker_pb2_grpc
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.rpc.errors import rpc_details
from spool.services.rpc.replies import readable
from spool.services.worker.kv_pages import KvTransfer, KvTransferError
from spool.services.worker.sequences import WorkerSequence


class OnThread(Protocol):
    """Runs a call on the thread that computes."""

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]: ...


async def import_kv(
    request: worker_pb2.ImportKvRequest,
    transfer: KvTransfer,
    on_thread: OnThread,
    security: ChannelSecurity,
    timeout_seconds: float | None,
) -> int:
    """Takes a sequence over from another worker; returns the size of its KV in bytes.

    Raises KvTransferError. A failure or a cancellation frees the pages that were set aside.
    """
    expected = on_thread(transfer.expect, request)

    def give_up(expected: asyncio.Future[WorkerSequence]) -> None:
        # Not awaited, because a cancelled call must not wait for a step: the thread frees the pages in its turn.
        if not expected.cancelled() and expected.exception() is None:
            on_thread(transfer.give_up, expected.result())

    try:
        sequence: WorkerSequence = await asyncio.shield(expected)
        channel = security.open_channel(request.source_address)
        try:
            size = await _fetch(request, sequence, transfer, on_thread, channel, security.metadata, timeout_seconds)
        except grpc.aio.AioRpcError as error:
            message = f"{request.source_address} gave no KV: {rpc_details(error)}"
            raise KvTransferError(error.code().name, message) from error
        finally:
            await channel.close(None)
        await on_thread(transfer.adopt, request, sequence)
    except BaseException:
        expected.add_done_callback(give_up)
        raise
    return size


async def _fetch(
    request: worker_pb2.ImportKvRequest,
    sequence: WorkerSequence,
    transfer: KvTransfer,
    on_thread: OnThread,
    channel: grpc.aio.Channel,
    metadata: tuple[tuple[str, str], ...],
    timeout_seconds: float | None,
) -> int:
    """Writes the pages as they come. Raises KvTransferError unless each comes once and in order, and AioRpcError."""
    wanted = worker_pb2.ExportKvRequest(
        worker_epoch=request.source_worker_epoch,
        scheduler_epoch=request.source_scheduler_epoch,
        sequence_id=request.sequence_id,
        kv_len=len(request.tokens),
        prefix_digest=sequence.known.digest(len(request.tokens)),  # its pages may have been given up meanwhile
    )
    size = taken = 0
    expected = len(sequence.table.pages)
    pages: list[worker_pb2.KvPage] = []
    checked = False
    async for part in worker_pb2_grpc.WorkerStub(channel).ExportKv(wanted, timeout=timeout_seconds, metadata=metadata):
        readable(part)
        if not checked:
            transfer.check_header(sequence, part.header)
            checked = True
            continue
        if taken == expected or part.page.index != taken:
            raise KvTransferError("DATA_LOSS", f"page {part.page.index} came after {taken} of {expected} pages")
        taken += 1
        size += len(part.page.data)
        pages.append(part.page)
        if len(pages) == transfer.pages_at_once:
            await on_thread(transfer.write, sequence, pages)
            pages = []
    if taken < expected:
        raise KvTransferError("DATA_LOSS", f"{taken} of {expected} pages came")
    if pages:
        await on_thread(transfer.write, sequence, pages)
    return size
