"""Rows that ask a draft worker for the outcomes of a verification: what is refused, of rows and of replies."""

from __future__ import annotations

import pytest

from protos import worker_pb2
from services.rpc.worker_codec import result_from_wire
from services.worker.executor import DraftStepExecutor, TargetStepExecutor
from tests.support.stand_in_worker import StandInEngine
from tests.unit.services.test_executor import EPOCH, PROMPT, Conversation, opening, row


@pytest.fixture
def draft() -> Conversation:
    return Conversation(DraftStepExecutor(StandInEngine(), EPOCH))


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
