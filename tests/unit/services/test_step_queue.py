"""Replies of a worker's steps: they leave before the worker proposes what they ask for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from engine.drafting.proposer import LocalProposer, Proposers
from engine.steps import RowOutcome, VerifyRow
from protos import worker_pb2
from services.worker.base_server import step_thread
from services.worker.executor import StepExecutor
from services.worker.queue import StepQueue
from tests.support.stand_in_worker import StandInEngine, continuation
from tests.support.waiting import LONG
from tests.unit.services.test_executor import EPOCH, PROMPT, opening, row


class Slow(LocalProposer):
    """Proposes once it may."""

    def __init__(self) -> None:
        self.begun, self.allowed = threading.Event(), threading.Event()

    def offer(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome], digests: Sequence[int]) -> None:
        self.begun.set()
        assert self.allowed.wait(LONG)
        for of_row, digest in zip(rows, digests, strict=True):
            of_row.drafting.keep(digest, continuation(PROMPT, 4)[1:])


def step(number: int, *rows: worker_pb2.Row) -> worker_pb2.StepRequest:
    return worker_pb2.StepRequest(worker_epoch=EPOCH, scheduler_epoch=1, step_id=number, rows=rows)


def test_a_reply_leaves_before_anything_is_proposed() -> None:
    """Also where another step waits, which verifies what is proposed then."""
    slow, first_token = Slow(), continuation(PROMPT, 1)
    executor = StepExecutor(StandInEngine(), EPOCH, proposer=Proposers(draft=slow))

    async def run() -> worker_pb2.StepReply:
        queue = StepQueue(executor, thread)
        first = queue.add(step(1, opening(1, sample=True, draft_length=3)))
        second = queue.add(step(2, row(1, [*PROMPT, *first_token], 5, sample=True, verify=3)))
        reply = await first
        assert list(reply.rows.tokens) == first_token
        await asyncio.to_thread(slow.begun.wait, LONG)
        assert not second.done()
        assert queue.running_seconds() is not None
        slow.allowed.set()
        return await second

    with step_thread() as thread:
        try:
            reply = asyncio.run(asyncio.wait_for(run(), LONG))
        finally:
            slow.allowed.set()
    assert list(reply.rows.tokens) == continuation(PROMPT, 5)[1:]
    assert list(reply.rows.verified) == [3]
