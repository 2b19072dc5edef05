"""Runs steps in order on the one thread of a worker that computes, and delivers their replies on its event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from spool.engine.errors import DeviceLostError
from spool.protos import worker_pb2
from spool.services.worker.ending import end_process
from spool.services.worker.executor import Reply, StepExecutor


class StepQueue:
    """Runs the steps of `executor` on `thread`. The constructor and `add` are called on the event loop.

    A device that is lost ends the process: its scheduler then recovers as from a kill.

    Where another step waits, the loop learns of a step's end only once the next pass is computing. Both threads share
    one interpreter: so the loop makes and sends the reply during a pass, instead of delaying its start. It learns of it
    at once where proposals are made before the next step.
    """

    def __init__(self, executor: StepExecutor, thread: ThreadPoolExecutor) -> None:
        self._executor = executor
        self._thread = thread
        # Each is written by one of the two threads only.
        self._added = self._begun = 0
        # Filled by one thread and emptied by the other.
        self._ended: deque[tuple[asyncio.Future[worker_pb2.StepReply], Reply | Exception]] = deque()
        self._began: float | None = None
        self.step_ended = asyncio.Event()
        """Set after every step; the waiter clears it."""

    def add(self, request: worker_pb2.StepRequest) -> asyncio.Future[worker_pb2.StepReply]:
        """Queues a step. Cancelling its reply takes the step off the queue; a running step ends first."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[worker_pb2.StepReply] = loop.create_future()
        self._added += 1
        self._thread.submit(self._run, request, self._executor.clock(), reply, loop)
        return reply

    def running_seconds(self) -> float | None:
        """How long the present step has been running; None between steps."""
        began = self._began
        return None if began is None else time.monotonic() - began

    def _run(
        self,
        request: worker_pb2.StepRequest,
        arrived: float,
        reply: asyncio.Future[worker_pb2.StepReply],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Runs in the thread."""
        self._begun += 1
        if not reply.cancelled():
            self._began = time.monotonic()
            try:
                self._execute(request, arrived, reply, loop)
            except DeviceLostError as error:
                end_process(str(error))
            self._began = None
        if self._begun == self._added:
            self._tell(loop)

    def _execute(
        self,
        request: worker_pb2.StepRequest,
        arrived: float,
        reply: asyncio.Future[worker_pb2.StepReply],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Raises DeviceLostError."""
        try:
            outcome: Reply | Exception = self._executor.execute(request, arrived, lambda: self._tell(loop))
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001
            outcome = error
        self._ended.append((reply, outcome))
        if self._executor.has_offers:
            self._tell(loop)
            self._executor.offer()

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._ended:
            loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        while self._ended:
            reply, outcome = self._ended.popleft()
            if reply.cancelled():
                continue
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                reply.set_result(outcome())
            except Exception as error:  # noqa: BLE001
                reply.set_exception(error)
        self.step_ended.set()
