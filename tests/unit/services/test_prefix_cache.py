"""Executors that share KV pages by prefix: what is computed, what is answered, and what is never shared."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from protos import worker_pb2
from services.worker.executor import DraftStepExecutor, TargetStepExecutor
from tests.support.stand_in_worker import MAX_LENGTH, VOCABULARY, StandInEngine, continuation
from tests.unit.services.test_executor import EPOCH, Conversation, row

SYSTEM = list(range(20, 37))
"""Four pages and one token."""

OK = worker_pb2.ROW_STATUS_OK


def opening(sequence_id: int, known: Sequence[int], end: int | None = None, **fields: object) -> worker_pb2.Row:
    """Feeds the first `end` tokens of a sequence that is `known`, or all of them."""
    parameters = worker_pb2.SequenceParameters(prompt_length=len(known), committed_tokens=known)
    return row(sequence_id, list(known[:end]), 0, parameters=parameters, **fields)


def target(pages: int = 100, **settings: object) -> Conversation:
    return Conversation(TargetStepExecutor(StandInEngine(pages=pages), EPOCH, **settings))  # type: ignore[arg-type]


def packed(reply: worker_pb2.StepReply) -> int:
    return reply.timings.packed_rows


def held(reply: worker_pb2.RowReply) -> tuple[int, int, int]:
    return reply.status, reply.kv_len, reply.reused


def test_common_beginning_is_computed_once() -> None:
    cell = target()
    first, second = [*SYSTEM, 50, 51], [*SYSTEM, 60]
    step = cell.step(opening(1, first, sample=True))
    assert (packed(step), held(step.rows[0])) == (19, (OK, 19, 0))
    step = cell.step(opening(2, second, sample=True))
    assert (packed(step), held(step.rows[0])) == (2, (OK, 18, 16))
    assert list(step.rows[0].tokens) == continuation(second, 1)
    assert step.free_pages == 100 - 5 - 1
    # Also once the first is gone, and for one that begins alike for two pages only.
    third = [*SYSTEM[:10], 70, 71]
    step = cell.step(opening(3, third, sample=True), released=[1, 2])
    assert (packed(step), held(step.rows[0])) == (4, (OK, 12, 8))
    assert list(step.rows[0].tokens) == continuation(third, 1)


def test_proposals_of_a_draft_are_not_shared() -> None:
    cell = Conversation(DraftStepExecutor(StandInEngine(), EPOCH))
    (reply,) = cell.step(opening(1, SYSTEM[:15], draft_length=6)).rows
    proposal = list(reply.tokens)
    assert reply.kv_len == 20
    step = cell.step(opening(2, [*SYSTEM[:15], *proposal], draft_length=2))
    assert held(step.rows[0]) == (OK, 22, 12)
    # Committed they are.
    cell.step(row(1, [*SYSTEM[:15], *proposal[:5], 7], 20, draft_length=2))
    step = cell.step(opening(3, [*SYSTEM[:15], *proposal], draft_length=2))
    assert held(step.rows[0]) == (OK, 22, 20)


@pytest.mark.parametrize(
    ("committed", "error"),
    [
        ([VOCABULARY], f"committed_tokens holds {VOCABULARY}, must be below vocabulary_size {VOCABULARY}"),
        ([1] * (MAX_LENGTH + 1), f"committed_tokens holds {MAX_LENGTH + 1} tokens, must hold at most {MAX_LENGTH}"),
    ],
)
def test_committed_tokens_out_of_range(committed: list[int], error: str) -> None:
    parameters = worker_pb2.SequenceParameters(prompt_length=1, committed_tokens=committed)
    (reply,) = target().step(row(1, [1], 0, parameters=parameters)).rows
    assert (reply.status, reply.error) == (worker_pb2.ROW_STATUS_INVALID, error)
