"""Executors that share KV pages by prefix: what is computed, what is answered, and what is never shared."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.steps import Computing, StepOutcome, VerifyRow, no_callback
from protos import worker_pb2
from scheduler.state.digests import DigestedTokens
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


def test_last_token_is_always_fed() -> None:
    """A prompt of whole pages that are all known: its last page is computed again, for the logits."""
    cell = target()
    prompt = SYSTEM[:16]
    cell.step(opening(1, prompt, sample=True))
    step = cell.step(opening(2, prompt, sample=True))
    assert (packed(step), held(step.rows[0])) == (4, (OK, 16, 12))
    assert list(step.rows[0].tokens) == continuation(prompt, 1)


def test_chunk_that_is_known_needs_no_work_and_leads_on_to_all_that_is() -> None:
    cell = target()
    cell.step(opening(1, SYSTEM, sample=True))
    steps = cell.executor.engine.steps
    step = cell.step(opening(2, SYSTEM, 6))
    assert (packed(step), held(step.rows[0])) == (0, (OK, 16, 16))
    assert step.rows[0].prefix_digest == DigestedTokens(SYSTEM).digest(16)
    assert cell.executor.engine.steps == steps
    (reply,) = cell.step(row(2, SYSTEM, 16, sample=True)).rows
    assert (list(reply.tokens), reply.reused) == (continuation(SYSTEM, 1), 0)


def test_chunks_take_over_what_was_computed_since_the_opening() -> None:
    """Two of the same prompt, chunk by chunk, one always behind the other."""
    cell = target()
    cell.step(opening(1, SYSTEM, 8))
    step = cell.step(row(1, SYSTEM[:12], 8), opening(2, SYSTEM, 8))
    assert [held(reply) for reply in step.rows] == [(OK, 12, 0), (OK, 8, 8)]
    step = cell.step(row(1, SYSTEM, 12, sample=True), row(2, SYSTEM[:12], 8))
    assert [held(reply) for reply in step.rows] == [(OK, 17, 0), (OK, 12, 4)]
    step = cell.step(row(2, SYSTEM, 12, sample=True))
    assert (packed(step), held(step.rows[0])) == (1, (OK, 17, 4))
    assert list(step.rows[0].tokens) == continuation(SYSTEM, 1)


def test_shared_page_is_not_written_to() -> None:
    """The first one goes back into a page that the second has taken over, with the same token and with another."""
    cell = target()
    prompt = SYSTEM[:16]
    cell.step(opening(1, prompt, sample=True))
    cell.step(opening(2, SYSTEM, sample=True))
    step = cell.step(row(1, prompt, 15, sample=True))
    assert (packed(step), held(step.rows[0])) == (4, (OK, 16, 0))
    step = cell.step(row(1, [*prompt[:9], 99], 9, sample=True))
    assert (packed(step), held(step.rows[0])) == (2, (OK, 10, 0))
    assert list(step.rows[0].tokens) == continuation([*prompt[:9], 99], 1)
    (reply,) = cell.step(row(2, [*SYSTEM, 3], 17, sample=True)).rows
    assert list(reply.tokens) == continuation([*SYSTEM, 3], 1)


def test_page_of_ones_own_that_is_written_to_is_not_found_any_more() -> None:
    cell = target()
    prompt = SYSTEM[:16]
    cell.step(opening(1, prompt, sample=True))
    cell.step(row(1, [*prompt[:15], 99], 15, sample=True))
    step = cell.step(opening(2, SYSTEM, sample=True))
    assert held(step.rows[0]) == (OK, 17, 12)
    step = cell.step(opening(3, [*prompt[:15], 99, 1], sample=True))
    assert held(step.rows[0]) == (OK, 17, 16)


def test_output_is_shared_as_well() -> None:
    """A sequence that comes back with what it was given before, as after a preemption or a scheduler's death."""
    cell = target()
    (reply,) = cell.step(opening(1, SYSTEM, sample=True)).rows
    output = continuation(SYSTEM, 4)
    known = [*SYSTEM, output[0]]
    (reply,) = cell.step(row(1, known, 17, draft_tokens=[*output[1:3], 1], sample=True)).rows
    assert (reply.accepted, reply.kv_len) == (2, 20)
    known = [*SYSTEM, *output]
    step = cell.step(opening(1, known, sample=True), scheduler_epoch=2)
    assert (packed(step), held(step.rows[0])) == (1, (OK, 21, 20))
    assert list(step.rows[0].tokens) == continuation(known, 1)


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


def test_engine_that_breaks_its_word_leaves_nothing_to_find() -> None:
    class Lying(StandInEngine):
        def step(self, rows: Sequence[VerifyRow], computing: Computing = no_callback) -> StepOutcome:
            outcome = super().step(rows, computing)
            for each in outcome.rows if self.steps == 2 else ():
                each.tokens, each.accepted = [1, 2, 3], 2
            return outcome

    cell = Conversation(TargetStepExecutor(Lying(), EPOCH))
    cell.step(opening(1, SYSTEM, sample=True))
    assert cell.step(row(1, [*SYSTEM, 1], 17, sample=True)).rows[0].status == worker_pb2.ROW_STATUS_FAILED
    assert cell.step(opening(2, SYSTEM, sample=True)).rows[0].reused == 0


def test_committed_tokens_that_are_not_the_rows_own_are_not_followed() -> None:
    cell = target()
    cell.step(opening(1, SYSTEM, sample=True))
    parameters = worker_pb2.SequenceParameters(prompt_length=17, committed_tokens=[1, *SYSTEM[1:]])
    (reply,) = cell.step(row(2, SYSTEM[:8], 0, parameters=parameters)).rows
    assert held(reply) == (OK, 8, 4)


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
