"""How a draft worker answers schedulers, which send it empty steps only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from spool.protos import worker_pb2


class SignsOfLife:
    """Answers empty steps on the thread that computes, so that a worker that hangs leaves them unanswered.

    The highest scheduler epoch that has spoken counts. Lower ones are fenced off, and new ones where the worker is
    `draining`.
    """

    def __init__(self, worker_epoch: int, thread: Executor, free_pages: Callable[[], int]) -> None:
        self._worker_epoch = worker_epoch
        self._thread = thread
        self._free_pages = free_pages
        self.scheduler_epoch = 0
        self.draining = False

    def add(self, request: worker_pb2.StepRequest) -> asyncio.Future[worker_pb2.StepReply]:
        return asyncio.get_running_loop().run_in_executor(self._thread, self._answer, request)

    def _answer(self, request: worker_pb2.StepRequest) -> worker_pb2.StepReply:
        epoch, status, error = request.scheduler_epoch, worker_pb2.STEP_STATUS_INVALID, ""
        newcomer = epoch > self.scheduler_epoch
        if request.worker_epoch != self._worker_epoch:
            status = worker_pb2.STEP_STATUS_WRONG_EPOCH
            error = f"worker_epoch is {request.worker_epoch}, this worker's is {self._worker_epoch}"
        elif epoch < self.scheduler_epoch:
            status = worker_pb2.STEP_STATUS_FENCED
            error = f"scheduler_epoch is {epoch}, one with {self.scheduler_epoch} has taken over"
        else:
            self.scheduler_epoch = epoch
            if newcomer and self.draining:
                error = "the worker is draining and takes no new schedulers"
            elif request.step_id or request.rows or request.following.sequence_ids or request.released_sequence_ids:
                error = f"step_id is {request.step_id}, must be 0 without rows and released sequences on a draft worker"
            else:
                status = worker_pb2.STEP_STATUS_OK
        return worker_pb2.StepReply(
            worker_epoch=self._worker_epoch,
            step_id=request.step_id,
            status=status,
            error=error,
            free_pages=self._free_pages(),
        )
