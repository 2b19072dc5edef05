"""The rules of the worker protocol, on executors with an arithmetic engine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.errors import DeviceLostError
from engine.steps import Computing, RowOutcome, StepOutcome, VerifyRow, no_callback
from protos import worker_pb2
from scheduler.state.digests import EMPTY_DIGEST, DigestedTokens
from services.worker.executor import DraftStepExecutor, StepExecutor, TargetStepExecutor
from tests.support.stand_in_worker import (
    DEVICE_FAILS,
    MAX_LENGTH,
    ROW_FAILS,
    STEP_FAILS,
    VOCABULARY,
    StandInEngine,
    continuation,
)

EPOCH = 77
PROMPT = [5, 6, 7, 8, 9]
PARAMETERS = worker_pb2.SequenceParameters(prompt_length=len(PROMPT))


class Conversation:
    """Speaks to an executor as a scheduler would."""

    def __init__(self, executor: StepExecutor) -> None:
        self.executor = executor
        self.step_id = 0

    def step(self, *rows: worker_pb2.Row, released: Sequence[int] = (), **fields: object) -> worker_pb2.StepReply:
        self.step_id += 1
        request = worker_pb2.StepRequest(
            **{"worker_epoch": EPOCH, "scheduler_epoch": 1, "step_id": self.step_id} | fields,
            released_sequence_ids=released,
            rows=rows,
        )
        reply = self.executor.execute(request, self.executor.clock())
        self.executor.check_integrity()
        return reply


def row(sequence_id: int, known: Sequence[int], kv_len: int, **fields: object) -> worker_pb2.Row:
    """A row that feeds what of `known` lies behind `kv_len`."""
    digest = DigestedTokens(known).digest(kv_len)
    return worker_pb2.Row(sequence_id=sequence_id, kv_len=kv_len, prefix_digest=digest, tokens=known[kv_len:], **fields)


def opening(sequence_id: int, **fields: object) -> worker_pb2.Row:
    return row(sequence_id, PROMPT, 0, parameters=PARAMETERS, **fields)


@pytest.fixture
def engine() -> StandInEngine:
    return StandInEngine()


@pytest.fixture
def target(engine: StandInEngine) -> Conversation:
    return Conversation(TargetStepExecutor(engine, EPOCH))


def test_mismatch_says_what_the_worker_has(target: Conversation) -> None:
    target.step(opening(1), opening(2))
    longer = [*PROMPT, 1, 2]
    too_far, other_tokens = target.step(row(1, longer, 6), row(2, [1, 2, 3, 4], 3)).rows
    for reply in (too_far, other_tokens):
        assert reply.status == worker_pb2.ROW_STATUS_KV_MISMATCH
        assert (reply.kv_len, reply.prefix_digest) == (5, DigestedTokens(PROMPT).digest(5))
    (mended,) = target.step(row(1, longer, reply.kv_len, sample=True)).rows
    assert list(mended.tokens) == continuation(longer, 1)


def test_a_row_of_a_forgotten_sequence_is_of_an_unknown_one_whatever_it_asks(target: Conversation) -> None:
    """One that feeds tokens which came with the opening, and is sent before its scheduler hears that they are gone."""
    forgotten = worker_pb2.Row(sequence_id=1, kv_len=13, known_tokens=2, sample=True, scoring=scoring(14, 24))
    (reply,) = target.step(forgotten).rows
    assert reply.status == worker_pb2.ROW_STATUS_UNKNOWN_SEQUENCE


def following(known: Sequence[int], sequence_id: int = 1) -> worker_pb2.FollowingRows:
    """A row that feeds what the last one has sampled, behind `known`."""
    digest = DigestedTokens(known).digest(len(known))
    return worker_pb2.FollowingRows(sequence_ids=[sequence_id], kv_lens=[len(known)], prefix_digests=[digest])


def test_what_more_there_is_to_tell_of_a_row_that_follows_comes_in_a_reply(target: Conversation) -> None:
    scored = worker_pb2.SequenceParameters(prompt_length=5, logits_digests=True, top_logprobs=0)
    asking = worker_pb2.SequenceParameters(prompt_length=5, logits_digests=True)
    opened = {1: scored, 2: asking, 3: PARAMETERS}
    target.step(*(row(number, PROMPT, 0, parameters=each, sample=True) for number, each in opened.items()))
    all_three = worker_pb2.FollowingRows()
    for sequence_id in opened:
        all_three.MergeFrom(following(PROMPT, sequence_id))
    reply = target.step(row(4, PROMPT, 0, parameters=PARAMETERS), following=all_three)
    token = continuation(PROMPT, 2)[1]
    followed = reply.followed
    assert (list(followed.counts), list(followed.tokens)) == ([0, 1, 1], [token, token])
    assert (list(followed.kv_lens), list(followed.logits_digests)) == ([6, 6], [token + 5, 0])
    fourth, first = reply.rows
    assert (fourth.sequence_id, first.sequence_id, list(first.logits_digests)) == (4, 1, [token + 5])


def test_nothing_follows_the_end_of_a_grammar(target: Conversation) -> None:
    parameters = worker_pb2.SequenceParameters(prompt_length=len(PROMPT))
    parameters.sampling.top_p = parameters.sampling.repetition_penalty = 1
    parameters.sampling.grammar.definition = "any"
    parameters.sampling.grammar.end_token_ids.extend(continuation(PROMPT, 1))
    target.step(row(1, PROMPT, 0, parameters=parameters, sample=True))
    (reply,) = target.step(following=following(PROMPT)).rows
    assert (reply.status, reply.kv_len) == (worker_pb2.ROW_STATUS_VOID, 5)


def scoring(first: int, *tokens: int) -> worker_pb2.PromptScoring:
    return worker_pb2.PromptScoring(first=first, tokens=tokens)


def committing(tokens: list[int]) -> dict[str, object]:
    return {"tokens": [1], "parameters": worker_pb2.SequenceParameters(prompt_length=1, committed_tokens=tokens)}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": [VOCABULARY]}, f"tokens holds {VOCABULARY}, must be below vocabulary_size {VOCABULARY}"),
        ({"tokens": [1], "draft_tokens": [5000], "sample": True}, "draft_tokens holds 5000"),
        ({"tokens": [1], "draft_tokens": [5]}, "draft_tokens came without sample"),
        ({"tokens": [1], "draft_length": 2}, "draft_length is 2, must be 0 on a target worker"),
        ({"tokens": [1] * (MAX_LENGTH + 1)}, f"reach {MAX_LENGTH + 1} tokens, must be at most {MAX_LENGTH}"),
        (
            {"tokens": [1], "scoring": scoring(0)},
            "scoring names 0 tokens from position 0 on, all must be between 1 and 1",
        ),
        ({"tokens": [1, 2], "scoring": scoring(0, 1)}, "all must be between 1 and 2"),
        ({"tokens": [1, 2], "scoring": scoring(2, 7, 8)}, "scoring names 2 tokens from position 2 on"),
        ({"tokens": [1, 2], "scoring": scoring(2, 7), "sample": True}, "all must be between 1 and 1"),
        ({"tokens": [1, 2], "scoring": scoring(1, 5000)}, "scoring.tokens holds 5000"),
        ({"tokens": [1] * 257, "scoring": scoring(1, *[1] * 257)}, "scoring names 257 tokens, must name at most 256"),
        ({"tokens": [1], "parameters": worker_pb2.SequenceParameters()}, "prompt_length is 0"),
        (committing([VOCABULARY]), f"committed_tokens holds {VOCABULARY}, must be below vocabulary_size {VOCABULARY}"),
        (
            committing([1] * (MAX_LENGTH + 1)),
            f"committed_tokens holds {MAX_LENGTH + 1} tokens, must hold at most {MAX_LENGTH}",
        ),
        (
            {
                "tokens": [1],
                "parameters": worker_pb2.SequenceParameters(
                    prompt_length=1, sampling=worker_pb2.SamplingParameters(temperature=-1, top_p=1)
                ),
            },
            "temperature is -1.0",
        ),
    ],
)
def test_invalid_row_fails_alone(target: Conversation, fields: dict[str, object], error: str) -> None:
    bad = worker_pb2.Row(**{"sequence_id": 1, "prefix_digest": EMPTY_DIGEST, "parameters": PARAMETERS} | fields)
    reply, other = target.step(bad, opening(2, sample=True)).rows
    assert reply.status == worker_pb2.ROW_STATUS_INVALID
    assert error in reply.error
    assert "\n" not in reply.error
    assert list(other.tokens) == continuation(PROMPT, 1)


def test_row_failing_in_the_engine_keeps_its_state(target: Conversation) -> None:
    target.step(opening(1), opening(2))
    known = [*PROMPT, ROW_FAILS]
    reply, other = target.step(row(1, known, 5, sample=True), row(2, [*PROMPT, 3], 5, sample=True)).rows
    assert (reply.status, reply.error, reply.kv_len) == (worker_pb2.ROW_STATUS_FAILED, "unlucky token", 5)
    assert list(other.tokens) == continuation([*PROMPT, 3], 1)
    (reply,) = target.step(row(1, [*PROMPT, 4], 5, sample=True)).rows
    assert list(reply.tokens) == continuation([*PROMPT, 4], 1)


def test_out_of_pages_fails_alone() -> None:
    target = Conversation(TargetStepExecutor(StandInEngine(pages=3), EPOCH))
    fits, too_much = target.step(opening(1, sample=True), opening(2, sample=True)).rows
    assert fits.status == worker_pb2.ROW_STATUS_OK
    assert too_much.status == worker_pb2.ROW_STATUS_OUT_OF_PAGES
    assert too_much.kv_len == 0
    (reply,) = target.step(row(2, PROMPT, 0, sample=True), released=[1]).rows
    assert list(reply.tokens) == continuation(PROMPT, 1)


def test_failed_step_forgets_its_sequences_only(target: Conversation, engine: StandInEngine) -> None:
    target.step(opening(1), opening(2), opening(3))
    reply = target.step(row(1, [*PROMPT, STEP_FAILS], 5), row(2, [*PROMPT, 3], 5))
    assert reply.status == worker_pb2.STEP_STATUS_OK
    for each in reply.rows:
        assert (each.status, each.error) == (worker_pb2.ROW_STATUS_FAILED, "the step exploded")
        assert (each.kv_len, each.prefix_digest) == (0, EMPTY_DIGEST)
    gone, kept = target.step(row(2, [*PROMPT, 3], 5), row(3, [*PROMPT, 3], 5, sample=True)).rows
    assert gone.status == worker_pb2.ROW_STATUS_UNKNOWN_SEQUENCE
    assert list(kept.tokens) == continuation([*PROMPT, 3], 1)


def test_a_lost_device_fails_no_rows_but_the_worker(target: Conversation) -> None:
    target.step(opening(1))
    with pytest.raises(DeviceLostError, match="CUDA error: device-side assert triggered"):
        target.step(row(1, [*PROMPT, DEVICE_FAILS], 5))


class LyingEngine(StandInEngine):
    def step(self, rows: Sequence[VerifyRow], computing: Computing = no_callback) -> StepOutcome:
        outcome = super().step(rows, computing)
        outcome.rows[0] = RowOutcome([1, 2, 3], accepted=2)
        return outcome


def test_engine_that_breaks_its_word_loses_the_sequence() -> None:
    engine = LyingEngine()
    target = Conversation(TargetStepExecutor(engine, EPOCH))
    lied, other = target.step(opening(1, sample=True), opening(2, sample=True)).rows
    assert lied.status == worker_pb2.ROW_STATUS_FAILED
    assert "KV for 5 positions, must be 7" in lied.error
    assert other.status == worker_pb2.ROW_STATUS_OK
    assert target.executor.sequences == 1


def test_proposals_of_a_draft_are_not_shared_before_they_are_committed() -> None:
    draft = Conversation(DraftStepExecutor(StandInEngine(), EPOCH))
    prompt = list(range(20, 35))

    def whole(sequence_id: int, known: list[int], draft_length: int) -> tuple[int, int, list[int]]:
        parameters = worker_pb2.SequenceParameters(prompt_length=len(known), committed_tokens=known)
        (reply,) = draft.step(row(sequence_id, known, 0, parameters=parameters, draft_length=draft_length)).rows
        return reply.kv_len, reply.reused, list(reply.tokens)

    kv_len, _, proposal = whole(1, prompt, 6)
    assert kv_len == 20
    assert whole(2, [*prompt, *proposal], 2)[:2] == (22, 12)
    draft.step(row(1, [*prompt, *proposal[:5], 7], 20, draft_length=2))
    assert whole(3, [*prompt, *proposal], 2)[:2] == (22, 20)
