"""Moves KV between workers as the scheduler core commands, and reports how each move ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from scheduler.messages import KvMoved, MoveKv
from services.scheduler.workers.worker_link import WorkerUnreachableError
from services.scheduler.workers.worker_set import WorkerSet

logger = logging.getLogger(__name__)


class KvMover:
    """Carries out `MoveKv` commands; calls `moved` once for each, after `timeout_seconds` at the latest."""

    def __init__(
        self,
        workers: WorkerSet,
        moved: Callable[[KvMoved], None],
        client_request_id: Callable[[int], str],
        timeout_seconds: float,
    ) -> None:
        self._workers = workers
        self._moved = moved
        self._client_request_id = client_request_id
        self._timeout = timeout_seconds
        self._running: set[asyncio.Task[None]] = set()

    def start(self, move: MoveKv) -> None:
        task = asyncio.create_task(self._move(move))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _move(self, move: MoveKv) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            size = await self._fetch(move)
        except Exception as error:  # whatever it was: without an answer the core would wait for the KV
            sequence_id = move.opening.sequence_id
            named = {"request_id": self._client_request_id(sequence_id)}
            logger.warning("KV of sequence %d was not moved: %s", sequence_id, error, extra=named)
            self._moved(KvMoved(move.move_id, False, loop.time() - began))
        else:
            self._moved(KvMoved(move.move_id, True, loop.time() - began, size))

    async def _fetch(self, move: MoveKv) -> int:
        source, destination = self._workers.find(move.source_id), self._workers.find(move.destination_id)
        if source is None or destination is None:
            raise WorkerUnreachableError(f"worker {move.source_id} or {move.destination_id} is gone")
        return (await destination.import_kv(move, source, self._timeout)).bytes
