"""Replies of a worker's steps: they leave before the worker proposes what they ask for; each tells of its own step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from spool.engine.drafting.proposer import LocalProposer, Proposers
from spool.engine.steps import Computing, RowOutcome, StepOutcome, VerifyRow, no_callback
from spool.protos import worker_pb2
from spool.services.worker.base_server import step_thread
from spool.services.worker.executor import StepExecutor
from spool.services.worker.queue import StepQueue
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


def test_a_reply_that_is_made_after_later_steps_tells_of_its_own() -> None:
    executor = StepExecutor(StandInEngine(), EPOCH)
    expected = continuation(PROMPT, 3)
    rows = [opening(1, sample=True), *(row(1, [*PROMPT, *expected[:n]], 4 + n, sample=True) for n in (1, 2))]
    replies = [executor.execute(step(number, one), 0.0) for number, one in enumerate(rows, 1)]
    for number, reply in enumerate(reply() for reply in replies):
        assert reply.step_id == number + 1
        assert list(reply.rows.tokens) == [expected[number]]
        assert list(reply.rows.kv_lens) == [len(PROMPT) + number]


class Unencodable(StandInEngine):
    def step(self, rows: Sequence[VerifyRow], computing: Computing = no_callback) -> StepOutcome:
        outcome = super().step(rows, computing)
        outcome.rows[0].tokens = [-1]
        return outcome


def test_a_reply_that_cannot_be_made_fails_its_step() -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match="-1"):
            await StepQueue(StepExecutor(Unencodable(), EPOCH), thread).add(step(1, opening(1, sample=True)))

    with step_thread() as thread:
        asyncio.run(asyncio.wait_for(run(), LONG))
