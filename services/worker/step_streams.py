"""The step streams of schedulers: how steps come in and replies go out, and what happens when a stream is lost.

A lost stream costs the worker nothing but its queue: steps that have not begun are dropped, and the reply of a running
one goes nowhere. Sequences and their KV stay. The next scheduler that opens a stream says which of them go on; a lower
epoch than the worker has seen is refused (services/worker/executor.py). `ended` wakes the registration, which announces
the worker again (services/worker/registration.py).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from spool.protos import worker_pb2

# Limit of the steps of one stream that are read ahead of its oldest reply; further steps stay with the sender.
_QUEUED_STEPS = 32


class Steps(Protocol):
    """Whatever answers steps."""

    def add(self, request: worker_pb2.StepRequest) -> asyncio.Future[worker_pb2.StepReply]:
        """Called on the event loop. Cancelling the reply takes back a step that has not begun."""
        ...


class StepStreams:
    """Streams that are open now. All calls are on the event loop."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._readers: set[asyncio.Task[None]] = set()
        # The highest scheduler epoch on each open stream.
        self._epochs: dict[int, int] = {}
        self._ids = itertools.count()
        self.ended = asyncio.Event()
        """Set whenever a stream ends; the waiter clears it."""

    @property
    def speaking_epoch(self) -> int:
        """The highest scheduler epoch that speaks on an open stream; 0 where none does."""
        return max(self._epochs.values(), default=0)

    async def run(self, requests: AsyncIterator[worker_pb2.StepRequest]) -> AsyncGenerator[worker_pb2.StepReply, None]:
        """Replies to the steps of one stream, in their order, until it ends. Raises what reading it raises."""
        replies: asyncio.Queue[asyncio.Future[worker_pb2.StepReply] | None] = asyncio.Queue(_QUEUED_STEPS)
        stream = next(self._ids)
        reader = asyncio.create_task(self._read(stream, requests, replies))
        self._readers.add(reader)
        try:
            while (reply := await replies.get()) is not None:
                yield await reply
            await asyncio.wait([reader])
            if not reader.cancelled():
                reader.result()
        finally:
            self._epochs.pop(stream, None)
            self.ended.set()
            self._readers.discard(reader)
            reader.cancel()
            while not replies.empty():
                if (unsent := replies.get_nowait()) is not None:
                    unsent.cancel()

    def end(self) -> None:
        """Reads no more: each stream ends after the replies to the steps that it has read. None ends by itself."""
        for reader in self._readers:
            reader.cancel()

    async def _read(
        self,
        stream: int,
        requests: AsyncIterator[worker_pb2.StepRequest],
        replies: asyncio.Queue[asyncio.Future[worker_pb2.StepReply] | None],
    ) -> None:
        try:
            async for request in requests:
                self._epochs[stream] = max(request.scheduler_epoch, self._epochs.get(stream, 0))
                await replies.put(self._steps.add(request))
        finally:
            await replies.put(None)
