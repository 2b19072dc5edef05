"""Rows that ask a draft worker for the outcomes of a verification: rules, replies, and how another step ends them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import grpc.aio
import pytest

from engine.drafting.model_draft import DraftEngine
from engine.models.loading import load_draft_engine
from engine.passes.layout import BatchedSequence
from engine.passes.runner import ModelRunner, PassResult
from engine.settings import EngineSettings
from engine.steps import Computing
from protos import worker_pb2, worker_pb2_grpc
from scheduler.messages import Outcome
from scheduler.state.digests import DigestedTokens
from services.rpc.worker_codec import result_from_wire
from services.worker.executor import DraftStepExecutor, TargetStepExecutor
from services.worker.queue import StepQueue
from services.worker.server import WorkerServer
from tests.support.stand_in_worker import StandInEngine, guess, next_token
from tests.support.tiny_models import TORCH_SHAPE, tiny_model
from tests.support.waiting import LONG
from tests.unit.services.test_executor import EPOCH, PARAMETERS, PROMPT, Conversation, opening, row

# --- by the rules of rows ---------------------------------------------------------------------------------------------


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
        assert list(outcome.confidences) == [min(token % 5 * 64, 255) for token in outcome.draft_tokens]


@pytest.mark.parametrize(
    ("lengths", "tokens", "confidences"),
    [([2, 1], [7, 8], b""), ([2], [7, 8, 9], b""), ([2], [7, 8], b"\x01"), ([2, 0, 1], [7, 8, 9], b"\x01\x02\x03")],
)
def test_outcomes_that_do_not_add_up_are_refused(lengths: list[int], tokens: list[int], confidences: bytes) -> None:
    reply = worker_pb2.RowReply(sequence_id=1, status=worker_pb2.ROW_STATUS_OK)
    reply.outcomes.accepted.extend([0, 1])
    reply.outcomes.tokens.extend([5, 6])
    reply.outcomes.lengths.extend(lengths)
    reply.outcomes.draft_tokens.extend(tokens)
    reply.outcomes.confidences = confidences
    with pytest.raises(ValueError, match=f"{len(lengths)} lengths of {sum(lengths)} in all, {len(tokens)} draft_tok"):
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


# --- with a model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> DraftEngine:
    folder = tmp_path_factory.mktemp("draft")
    tiny_model("llama", **TORCH_SHAPE).save_pretrained(folder)
    settings = EngineSettings(
        str(folder), dtype="float32", threads=1, page_size=4, kv_pages=60, max_num_batched_tokens=64
    )
    return load_draft_engine(settings, lambda *_: None)


class Watched:
    """Holds passes up: `before[n]` is called before pass n of the engine, counted from 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: dict[int, Callable[[], object]] = {}
        self.passes = 0
        run = ModelRunner.run

        def held_up(runner: ModelRunner, sequences: list[BatchedSequence], computing: Computing) -> PassResult:
            self.passes += 1
            self.before.get(self.passes, lambda: None)()
            return run(runner, sequences, computing)

        monkeypatch.setattr(ModelRunner, "run", held_up)


def outcomes_of(reply: worker_pb2.StepReply) -> list[tuple[Outcome, ...]]:
    assert reply.status == worker_pb2.STEP_STATUS_OK
    results = [result_from_wire(one) for one in reply.rows]
    assert all(not result.error for result in results)
    return [result.outcomes for result in results]


def ahead_step(step_id: int) -> worker_pb2.StepRequest:
    """Two sequences, opened by it."""
    rows = [opening(1, draft_tokens=[3, 4, 5], draft_length=4, outcomes=3)]
    rows.append(row(2, [*PROMPT, 1, 2], 0, parameters=PARAMETERS, draft_tokens=[8], draft_length=4, outcomes=3))
    return worker_pb2.StepRequest(worker_epoch=EPOCH, scheduler_epoch=1, step_id=step_id, rows=rows)


async def test_another_step_ends_one_that_prepares(engine: DraftEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gRPC. The step has begun its third pass, of five, when the other one comes."""
    executor = DraftStepExecutor(engine, EPOCH)
    server = WorkerServer(executor)
    third_pass, arrived = threading.Event(), threading.Event()
    watched = Watched(monkeypatch)

    def wait_for_the_other() -> None:
        third_pass.set()
        assert arrived.wait(LONG)

    added: list[int] = []
    add = StepQueue.add

    def watched_add(queue: StepQueue, request: worker_pb2.StepRequest) -> asyncio.Future[worker_pb2.StepReply]:
        reply = add(queue, request)
        # Workers of other tests may still be asked for a sign of life.
        if request.worker_epoch == EPOCH:
            added.append(request.step_id)
            if request.step_id == 3:
                arrived.set()
        return reply

    monkeypatch.setattr(StepQueue, "add", watched_add)
    address = await server.start()
    requests: asyncio.Queue[worker_pb2.StepRequest | None] = asyncio.Queue()

    async def sent() -> AsyncIterator[worker_pb2.StepRequest]:
        while (request := await requests.get()) is not None:
            yield request

    try:
        async with asyncio.timeout(LONG), grpc.aio.insecure_channel(address) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Steps(sent())
            requests.put_nowait(ahead_step(1))
            whole = await call.read()
            assert watched.passes == 5
            watched.passes, watched.before = 0, {3: wait_for_the_other}
            requests.put_nowait(ahead_step(2))
            assert await asyncio.to_thread(third_pass.wait, LONG)
            following = [row(1, [*PROMPT, 3, 70], 6, draft_length=2)]
            requests.put_nowait(
                worker_pb2.StepRequest(worker_epoch=EPOCH, scheduler_epoch=1, step_id=3, rows=following)
            )
            cut = await call.read()
            after = await call.read()
            requests.put_nowait(None)
    finally:
        await server.stop(1)
    assert added == [1, 2, 3]
    assert [len(one) for one in outcomes_of(whole)] == [3, 3]
    assert outcomes_of(cut) == [
        tuple(Outcome(o.accepted, o.token, o.draft_tokens[:2], o.confidences[:2]) for o in one)
        for one in outcomes_of(whole)
    ]
    assert [one.kv_len for one in cut.rows] == [one.kv_len for one in whole.rows] == [8, 8]
    assert [len(one.tokens) for one in after.rows] == [2]
    assert watched.passes == 3 + 2
    executor.check_integrity()
    executor.execute(worker_pb2.StepRequest(worker_epoch=EPOCH, scheduler_epoch=2), 0.0)  # frees all of the first's
    assert engine.pool.free_pages == engine.pool.total_pages
