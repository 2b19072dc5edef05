"""Rows that ask a draft worker for the outcomes of a verification: rules, replies, and how another step ends them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import grpc.aio
import pytest

from engine.steps import AheadRow, Awaited, Computing, StepOutcome, never_awaited, no_callback
from protos import worker_pb2, worker_pb2_grpc
from scheduler.state.digests import DigestedTokens
from services.rpc.worker_codec import result_from_wire
from services.worker.executor import DraftStepExecutor, TargetStepExecutor
from services.worker.server import WorkerServer
from tests.support.stand_in_worker import StandInEngine, guess, next_token
from tests.support.waiting import LONG, wait_until
from tests.unit.services.test_executor import EPOCH, PROMPT, Conversation, opening, row


@pytest.fixture
def draft() -> Conversation:
    return Conversation(DraftStepExecutor(StandInEngine(), EPOCH))


def test_outcomes_come_with_their_proposals(draft: Conversation) -> None:
    (reply,) = draft.step(opening(1, draft_length=3)).rows
    proposal = list(reply.tokens)
    (reply,) = draft.step(row(1, PROMPT, 4, draft_tokens=proposal, draft_length=2, outcomes=3)).rows
    assert reply.status == worker_pb2.ROW_STATUS_OK
    assert list(reply.tokens) == []
    assert (reply.kv_len, reply.prefix_digest) == (8, DigestedTokens([*PROMPT, *proposal]).digest(8))
    outcomes = result_from_wire(reply).outcomes
    assert 1 <= len(outcomes) <= 3
    for outcome in outcomes:
        known = [*PROMPT, *proposal[: outcome.accepted], outcome.token]
        assert outcome.token in (guess(known[:-1]), next_token(known[:-1]))
        first = guess(known)
        assert outcome.draft_tokens == (first, guess([*known, first]))


@pytest.mark.parametrize(("lengths", "tokens"), [([2, 1], [7, 8]), ([2], [7, 8]), ([2, 0, 1], [7, 8, 9])])
def test_outcomes_that_do_not_add_up_are_refused(lengths: list[int], tokens: list[int]) -> None:
    reply = worker_pb2.RowReply(sequence_id=1, status=worker_pb2.ROW_STATUS_OK)
    reply.outcomes.accepted.extend([0, 1])
    reply.outcomes.tokens.extend([5, 6])
    reply.outcomes.lengths.extend(lengths)
    reply.outcomes.draft_tokens.extend(tokens)
    with pytest.raises(ValueError, match=f"{len(lengths)} lengths of {sum(lengths)} in all and {len(tokens)} "):
        result_from_wire(reply)


def test_after_an_outcome_its_proposal_goes_on(draft: Conversation) -> None:
    """The proposal and the token of the target lie in the worker's KV as far as they came true."""
    (reply,) = draft.step(opening(1, draft_length=3)).rows
    proposal = list(reply.tokens)
    (reply,) = draft.step(row(1, PROMPT, 4, draft_tokens=proposal, draft_length=2, outcomes=3)).rows
    outcome = result_from_wire(reply).outcomes[-1]
    known = [*PROMPT, *proposal[: outcome.accepted], outcome.token]
    fed = [*known, *outcome.draft_tokens]
    (reply,) = draft.step(
        row(1, known, len(known) - 1, draft_tokens=outcome.draft_tokens, draft_length=1, outcomes=1)
    ).rows
    assert (reply.kv_len, reply.prefix_digest) == (len(fed), DigestedTokens(fed).digest(len(fed)))
    (reply,) = draft.step(row(1, [*known, 500], len(known), draft_length=1)).rows
    assert list(reply.tokens) == [guess([*known, 500])]


def test_a_target_prepares_for_nothing() -> None:
    target = Conversation(TargetStepExecutor(StandInEngine(), EPOCH))
    (reply,) = target.step(opening(1, draft_tokens=[3], sample=True, outcomes=1)).rows
    assert reply.status == worker_pb2.ROW_STATUS_INVALID
    assert reply.error == "outcomes is 1, must be 0 on a target worker"


def test_rows_of_a_step_all_have_outcomes_or_none(draft: Conversation) -> None:
    plain, ahead = opening(1, draft_length=2), opening(2, draft_length=2, outcomes=4)
    first, second, third = draft.step(plain, ahead, opening(3)).rows
    assert first.status == third.status == worker_pb2.ROW_STATUS_OK
    assert second.status == worker_pb2.ROW_STATUS_INVALID
    assert second.error == "outcomes is 4, and 0 in the first row: all rows have it or none"
    first, second = draft.step(ahead, row(1, PROMPT, 4, draft_length=2)).rows
    assert first.status == worker_pb2.ROW_STATUS_OK
    assert second.error == "outcomes is 0, and 4 in the first row: all rows have it or none"


class Waiting(StandInEngine):
    """Prepares when another step waits; tests/engine/test_draft_ahead.py says what engines do then."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def prepare(
        self, rows: Sequence[AheadRow], computing: Computing = no_callback, awaited: Awaited = never_awaited
    ) -> StepOutcome:
        self.begun.set()
        wait_until(awaited, "another step waits", pause=0.001)
        return super().prepare(rows, computing, awaited)


async def test_another_step_ends_one_that_prepares() -> None:
    engine = Waiting()
    executor = DraftStepExecutor(engine, EPOCH)
    server = WorkerServer(executor)
    ahead = opening(1, draft_tokens=[3, 4, 5], draft_length=4, outcomes=3)
    steps = [[ahead], [row(1, [*PROMPT, 3, 70], 6, draft_length=2)]]
    address = await server.start()
    try:
        async with asyncio.timeout(LONG), grpc.aio.insecure_channel(address) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Steps()
            for number, rows in enumerate(steps):
                await call.write(
                    worker_pb2.StepRequest(worker_epoch=EPOCH, scheduler_epoch=1, step_id=number, rows=rows)
                )
                assert await asyncio.to_thread(engine.begun.wait, LONG)
            cut, after = [await call.read() for _ in steps]
            await call.done_writing()
    finally:
        await server.stop(1)
    assert (cut.rows[0].status, cut.rows[0].kv_len) == (worker_pb2.ROW_STATUS_OK, 8)
    assert result_from_wire(cut.rows[0]).outcomes == ()
    assert len(after.rows[0].tokens) == 2
    executor.check_integrity()
