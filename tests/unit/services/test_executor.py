"""The rules of the worker protocol, on executors with an arithmetic engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from spool.engine.drafting.lookup.text_store import TextStore
from spool.engine.drafting.proposer import Asked, Lookup, Proposers
from spool.engine.drafting.sequence import SequenceDrafting
from spool.engine.errors import DeviceLostError
from spool.engine.steps import Computing, RowOutcome, StepOutcome, VerifyRow, no_callback
from spool.protos import worker_pb2
from spool.scheduler.messages import DraftingReport, ProposalSource, Row, RowResult, RowStatus, SendStep
from spool.scheduler.state.digests import EMPTY_DIGEST, DigestedTokens
from spool.services.rpc.worker_codec import results_from_wire
from spool.services.worker.executor import StepExecutor
from tests.support.stand_in_worker import (
    DEVICE_FAILS,
    MAX_LENGTH,
    ROW_FAILS,
    STEP_FAILS,
    TOKENS,
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

    def reply(self, *rows: worker_pb2.Row, released: Sequence[int] = (), **fields: object) -> worker_pb2.StepReply:
        self.step_id += 1
        request = worker_pb2.StepRequest(
            **{"worker_epoch": EPOCH, "scheduler_epoch": 1, "step_id": self.step_id} | fields,
            released_sequence_ids=released,
            rows=rows,
        )
        reply = self.executor.execute(request, self.executor.clock())()
        self.executor.offer()
        self.executor.check_integrity()
        return reply

    def step(self, *rows: worker_pb2.Row, **fields: Any) -> list[RowResult]:
        reply = self.reply(*rows, **fields)
        assert reply.status == worker_pb2.STEP_STATUS_OK
        following = fields.get("following", worker_pb2.FollowingRows())
        ids = [*(one.sequence_id for one in rows), *following.sequence_ids]
        sent = SendStep("", self.step_id, tuple(Row(sequence_id, 0, 0, (), 0) for sequence_id in ids))
        return list(results_from_wire(sent, reply))


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
    return Conversation(StepExecutor(engine, EPOCH))


def test_mismatch_says_what_the_worker_has(target: Conversation) -> None:
    target.step(opening(1), opening(2))
    longer = [*PROMPT, 1, 2]
    too_far, other_tokens = target.step(row(1, longer, 6), row(2, [1, 2, 3, 4], 3))
    for reply in (too_far, other_tokens):
        assert reply.status == RowStatus.KV_MISMATCH
        assert (reply.kv_len, reply.prefix_digest) == (5, DigestedTokens(PROMPT).digest(5))
    (mended,) = target.step(row(1, longer, reply.kv_len, sample=True))
    assert list(mended.tokens) == continuation(longer, 1)


def test_a_row_of_a_forgotten_sequence_is_of_an_unknown_one_whatever_it_asks(target: Conversation) -> None:
    """One that feeds tokens which came with the opening, and is sent before its scheduler hears that they are gone."""
    forgotten = worker_pb2.Row(sequence_id=1, kv_len=13, known_tokens=2, sample=True, scoring=scoring(14, 24))
    (reply,) = target.step(forgotten)
    assert reply.status == RowStatus.UNKNOWN_SEQUENCE


def following(known: Sequence[int], sequence_id: int = 1) -> worker_pb2.FollowingRows:
    """A row that feeds what the last one has sampled, behind `known`."""
    digest = DigestedTokens(known).digest(len(known))
    return worker_pb2.FollowingRows(sequence_ids=[sequence_id], kv_lens=[len(known)], prefix_digests=[digest])


def test_rows_that_follow_are_answered_after_the_others(target: Conversation) -> None:
    scored = worker_pb2.SequenceParameters(prompt_length=5, logits_digests=True, top_logprobs=0)
    asking = worker_pb2.SequenceParameters(prompt_length=5, logits_digests=True)
    opened = {1: scored, 2: asking, 3: PARAMETERS}
    target.step(*(row(number, PROMPT, 0, parameters=each, sample=True) for number, each in opened.items()))
    all_three = worker_pb2.FollowingRows()
    for sequence_id in opened:
        all_three.MergeFrom(following(PROMPT, sequence_id))
    fourth, *followed = target.step(row(4, PROMPT, 0, parameters=PARAMETERS), following=all_three)
    token = continuation(PROMPT, 2)[1]
    assert (fourth.tokens, fourth.kv_len, fourth.prefix_digest) == ((), 5, DigestedTokens(PROMPT).digest(5))
    assert [(one.tokens, one.kv_len) for one in followed] == [((token,), 6)] * 3
    assert [one.logits_digests for one in followed] == [(token + 5,), (token + 5,), ()]
    assert [len(one.logprobs) for one in followed] == [1, 0, 0]


@pytest.mark.parametrize("name", ["kv_lens", "prefix_digests", "draft_lengths", "verify"])
def test_a_step_whose_following_rows_are_uneven_is_refused_and_nothing_else(target: Conversation, name: str) -> None:
    target.step(opening(1, sample=True))
    uneven = following(PROMPT)
    getattr(uneven, name).extend([0, 0])
    reply = target.reply(opening(2), following=uneven)
    assert reply.status == worker_pb2.STEP_STATUS_INVALID
    assert f"following.{name} has" in reply.error
    assert "must have 1 as sequence_ids has" in reply.error
    assert target.executor.sequences == 1
    (follows,) = target.step(following=following(PROMPT))
    assert follows.tokens == tuple(continuation(PROMPT, 2)[1:])


def test_nothing_follows_the_end_of_a_grammar(target: Conversation) -> None:
    parameters = worker_pb2.SequenceParameters(prompt_length=len(PROMPT))
    parameters.sampling.top_p = parameters.sampling.repetition_penalty = 1
    parameters.sampling.grammar.definition = "any"
    parameters.sampling.grammar.end_token_ids.extend(continuation(PROMPT, 1))
    target.step(row(1, PROMPT, 0, parameters=parameters, sample=True))
    (reply,) = target.step(following=following(PROMPT))
    assert (reply.status, reply.kv_len) == (RowStatus.VOID, 5)


def scoring(first: int, *tokens: int) -> worker_pb2.PromptScoring:
    return worker_pb2.PromptScoring(first=first, tokens=tokens)


def committing(tokens: list[int]) -> dict[str, object]:
    return {"tokens": [1], "parameters": worker_pb2.SequenceParameters(prompt_length=1, committed_tokens=tokens)}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": [VOCABULARY]}, f"tokens holds {VOCABULARY}, must be below vocabulary_size {VOCABULARY}"),
        ({"tokens": [1], "verify": 5}, "verify is 5, must be 0 without sample"),
        ({"tokens": [1] * (MAX_LENGTH + 1)}, f"reach {MAX_LENGTH + 1} tokens, must be at most {MAX_LENGTH}"),
        (
            {"tokens": [1], "verify": MAX_LENGTH, "sample": True},
            f"reach {MAX_LENGTH + 1} tokens, must be at most {MAX_LENGTH}",
        ),
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
    reply, other = target.step(bad, opening(2, sample=True))
    assert reply.status == RowStatus.INVALID
    assert error in reply.error
    assert "\n" not in reply.error
    assert list(other.tokens) == continuation(PROMPT, 1)


def test_row_failing_in_the_engine_keeps_its_state(target: Conversation) -> None:
    target.step(opening(1), opening(2))
    known = [*PROMPT, ROW_FAILS]
    reply, other = target.step(row(1, known, 5, sample=True), row(2, [*PROMPT, 3], 5, sample=True))
    assert (reply.status, reply.error, reply.kv_len) == (RowStatus.FAILED, "unlucky token", 5)
    assert list(other.tokens) == continuation([*PROMPT, 3], 1)
    (reply,) = target.step(row(1, [*PROMPT, 4], 5, sample=True))
    assert list(reply.tokens) == continuation([*PROMPT, 4], 1)


def test_out_of_pages_fails_alone() -> None:
    target = Conversation(StepExecutor(StandInEngine(pages=3), EPOCH))
    fits, too_much = target.step(opening(1, sample=True), opening(2, sample=True))
    assert fits.status == RowStatus.OK
    assert too_much.status == RowStatus.OUT_OF_PAGES
    assert too_much.kv_len == 0
    (reply,) = target.step(row(2, PROMPT, 0, sample=True), released=[1])
    assert list(reply.tokens) == continuation(PROMPT, 1)


def test_failed_step_forgets_its_sequences_only(target: Conversation, engine: StandInEngine) -> None:
    target.step(opening(1), opening(2), opening(3))
    for each in target.step(row(1, [*PROMPT, STEP_FAILS], 5), row(2, [*PROMPT, 3], 5)):
        assert (each.status, each.error) == (RowStatus.FAILED, "the step exploded")
        assert (each.kv_len, each.prefix_digest) == (0, EMPTY_DIGEST)
    gone, kept = target.step(row(2, [*PROMPT, 3], 5), row(3, [*PROMPT, 3], 5, sample=True))
    assert gone.status == RowStatus.UNKNOWN_SEQUENCE
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
    target = Conversation(StepExecutor(engine, EPOCH))
    lied, other = target.step(opening(1, sample=True), opening(2, sample=True))
    assert lied.status == RowStatus.FAILED
    assert "KV for 5 positions, must be 7" in lied.error
    assert other.status == RowStatus.OK
    assert target.executor.sequences == 1


class Oracle(Lookup):
    """Proposes what the stand-in will choose, `wrong` tokens of the proposal aside."""

    def __init__(self, *wrong: int) -> None:
        super().__init__(1)
        self.wrong = wrong
        self.offered: list[tuple[int, list[int], int]] = []
        self.forgotten: list[int] = []

    def offer(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome], digests: Sequence[int]) -> None:
        for one, outcome, digest in zip(rows, outcomes, digests, strict=True):
            known = [*one.history, *outcome.tokens[-1:]]
            assert digest == DigestedTokens(known).digest(len(known))
            self.offered.append((one.drafting.sequence_id, known, one.draft_length))
            proposal = continuation(known, one.draft_length)
            one.drafting.keep(digest, [*proposal[: len(proposal) - len(self.wrong)], *self.wrong][: len(proposal)])

    def forget(self, drafting: SequenceDrafting) -> None:
        self.forgotten.append(drafting.sequence_id)


def drafting(proposer: Oracle, **options: Any) -> Conversation:
    return Conversation(StepExecutor(StandInEngine(), EPOCH, proposer=Proposers(draft=proposer), **options))


def test_rows_verify_what_was_proposed_behind_the_reply() -> None:
    target = drafting(oracle := Oracle(500))
    output = continuation(PROMPT, 20)
    (first,) = target.step(opening(1, sample=True, draft_length=3))
    assert oracle.offered == [(1, [*PROMPT, *output[:1]], 3)]
    known = [*PROMPT, *first.tokens]
    (second,) = target.step(row(1, known, 5, sample=True, verify=4, draft_length=2))
    assert (second.tokens, second.verified, second.accepted, second.kv_len) == (tuple(output[1:4]), 3, 2, 8)
    assert oracle.offered[1:] == [(1, [*PROMPT, *output[:4]], 2)]
    follows = following(known)
    follows.verify.append(1)
    (third,) = target.step(following=follows)
    assert (third.tokens, third.verified, third.accepted) == (tuple(output[4:6]), 1, 1)
    assert len(oracle.offered) == 2


@pytest.mark.parametrize(
    ("lengths", "verified", "source"),
    [
        ({"draft_length": 2}, 2, ProposalSource.LOOKUP),
        ({"draft_length": 2, "lookup_length": 6}, 6, ProposalSource.LOOKUP),
        ({"lookup_length": 6}, 6, ProposalSource.LOOKUP),
        ({"draft_length": 3, "lookup_length": 0}, 3, ProposalSource.DRAFT),
    ],
)
def test_what_lookup_finds_has_its_own_length_and_the_answer_tells_who_proposed(
    lengths: dict[str, int], verified: int, source: ProposalSource
) -> None:
    """By default that of the draft, which proposes where nothing is to be looked up."""
    target = Conversation(StepExecutor(StandInEngine(), EPOCH, proposer=Proposers(Lookup(1), Oracle())))
    # What is sampled stands in the prompt.
    prompt = next([a, b, 9] for b in TOKENS for a in TOKENS if continuation([a, b, 9], 1) == [a])
    parameters = worker_pb2.SequenceParameters(prompt_length=len(prompt))
    (first,) = target.step(row(1, prompt, 0, parameters=parameters, sample=True, **lengths))
    (second,) = target.step(row(1, [*prompt, *first.tokens], len(prompt), sample=True, verify=8))
    assert (first.source, second.verified, second.source) == (None, verified, source)


def test_nothing_is_offered_where_nothing_can_be_verified(engine: StandInEngine) -> None:
    engine.pool.rewinds = False
    target = Conversation(StepExecutor(engine, EPOCH, proposer=Proposers(draft=(oracle := Oracle()))))
    (first,) = target.step(opening(1, sample=True, draft_length=3))
    (second,) = target.step(row(1, [*PROMPT, *first.tokens], 5, sample=True, verify=3, draft_length=3))
    assert (second.tokens, second.verified) == (tuple(continuation(PROMPT, 2)[1:]), 0)
    assert oracle.offered == []


def test_a_proposal_after_other_tokens_is_not_verified() -> None:
    target = drafting(Oracle())
    target.step(opening(1, sample=True, draft_length=3))
    known = [*PROMPT, 3]
    (reply,) = target.step(row(1, known, 5, sample=True, verify=3))
    assert (reply.tokens, reply.verified) == (tuple(continuation(known, 1)), 0)


def test_a_proposal_that_is_no_token_of_the_vocabulary_is_not_verified() -> None:
    target = drafting(Oracle(VOCABULARY))
    (first,) = target.step(opening(1, sample=True, draft_length=3))
    (reply,) = target.step(row(1, [*PROMPT, *first.tokens], 5, sample=True, verify=3))
    assert (reply.tokens, reply.verified) == (tuple(continuation(PROMPT, 2)[1:]), 0)


def test_a_row_verifies_no_more_than_a_pass_takes() -> None:
    target = drafting(Oracle(), prefix_cache=False)
    prompt = [*PROMPT] * 50
    parameters = worker_pb2.SequenceParameters(prompt_length=len(prompt))
    (first,) = target.step(row(1, prompt, 0, parameters=parameters, sample=True, draft_length=8))
    again = row(1, [*prompt, *first.tokens], 0, parameters=parameters, sample=True, verify=8)
    (reply,) = target.step(again)
    assert (reply.verified, len(reply.tokens)) == (256 - 251, 6)


def test_output_that_is_expected_is_proposed_by_its_place() -> None:
    """Instead of what a draft would propose, and as far as it goes."""
    target = drafting(oracle := Oracle())
    output = continuation(PROMPT, 20)
    parameters = worker_pb2.SequenceParameters(prompt_length=5, expected_output=[*output[:3], 1, *output[4:6]])
    known = list(PROMPT)
    (first,) = target.step(row(1, PROMPT, 0, parameters=parameters, sample=True, draft_length=8))
    known += first.tokens
    found = [(0, 0)]
    for _ in range(4):
        (reply,) = target.step(row(1, known, len(known) - 1, sample=True, verify=8, draft_length=8))
        known += reply.tokens
        found.append((reply.verified, reply.accepted))
    assert known == [*PROMPT, *output[: len(known) - 5]]
    assert found == [(0, 0), (5, 2), (2, 2), (0, 0), (0, 0)]
    assert oracle.offered == []


def test_what_was_committed_in_plain_rounds_is_proposed_to_another_sequence() -> None:
    """Also what was expected, and only what rows have fed: not what is sampled last."""
    output = continuation(PROMPT, 20)
    for expected in ([], [1, 2]):
        lookup = Lookup(2, TextStore(1 << 20))
        target = Conversation(StepExecutor(StandInEngine(), EPOCH, proposer=Proposers(lookup)))
        parameters = worker_pb2.SequenceParameters(prompt_length=5, expected_output=expected)
        known = list(PROMPT)
        (reply,) = target.step(row(1, known, 0, parameters=parameters, sample=True))
        for _ in range(5):
            known += reply.tokens
            (reply,) = target.step(row(1, known, len(known) - 1, sample=True))
        (first,) = target.step(opening(2, sample=True, draft_length=8))
        (second,) = target.step(row(2, [*PROMPT, *first.tokens], 5, sample=True, verify=8))
        assert (second.verified, second.accepted, list(second.tokens)) == (4, 4, output[1:6])


def test_what_failed_is_not_offered_and_what_left_is_forgotten() -> None:
    target = drafting(oracle := Oracle())
    target.step(opening(1, draft_length=1), opening(2, draft_length=1), opening(3, draft_length=1))
    del oracle.offered[:]
    target.step(row(1, [*PROMPT, ROW_FAILS], 5, draft_length=1), row(2, [*PROMPT, 3], 5, draft_length=1))
    assert oracle.offered == [(2, [*PROMPT, 3], 1)]
    target.step(row(3, [*PROMPT, STEP_FAILS], 5, draft_length=1), row(2, [*PROMPT, 3, 4], 6, draft_length=1))
    assert len(oracle.offered) == 1
    assert sorted(oracle.forgotten) == [2, 3]
    target.step(released=[1])
    assert oracle.forgotten[2:] == [1]


class Remote(Oracle):
    """Asks a draft worker, as far as the executor knows."""

    def __init__(self) -> None:
        super().__init__()
        self.grants: list[int | None] = []
        self.waits: list[float] = []

    def set_grant(self, grant: worker_pb2.DraftGrant | None) -> None:
        self.grants.append(None if grant is None else grant.number)

    def take(self, asked: Sequence[Asked], wait_seconds: float) -> list[Sequence[int]]:
        self.waits.append(wait_seconds)
        return super().take(asked, wait_seconds)

    def report(self) -> DraftingReport | None:
        return DraftingReport(False, 3, 2, (7,)) if self.grants[-1] else None


def test_grants_and_waits_reach_who_asks_drafts_and_the_reply_says_how_they_serve() -> None:
    remote = Remote()
    target = Conversation(StepExecutor(StandInEngine(), EPOCH, proposer=Proposers(draft=remote), remote=remote))
    assert not target.reply(opening(1, sample=True), wait_seconds=9.0).HasField("drafting")
    granted = worker_pb2.DraftGrant(number=4)
    reply = target.reply(row(1, [*PROMPT, 3], 5, sample=True, verify=1), grant=granted, wait_seconds=0.5)
    assert reply.drafting == worker_pb2.DraftingReport(asked=3, in_time=2, refused_ids=[7])
    assert (remote.grants, remote.waits) == ([None, 4], [0.5])


class Broken(Oracle):
    def offer(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome], digests: Sequence[int]) -> None:
        raise RuntimeError("no proposals today")


def test_proposing_that_fails_fails_no_row(caplog: pytest.LogCaptureFixture) -> None:
    target = drafting(Broken())
    (first,) = target.step(opening(1, sample=True, draft_length=3))
    (reply,) = target.step(row(1, [*PROMPT, *first.tokens], 5, sample=True, verify=3))
    assert (reply.tokens, reply.verified) == (tuple(continuation(PROMPT, 2)[1:]), 0)
    assert "nothing is proposed after step 1" in caplog.text


def test_the_time_of_proposing_is_told_with_the_next_step() -> None:
    """The clock goes on by a second each time it is looked at."""
    seconds = iter(range(1000))
    executor = StepExecutor(
        StandInEngine(), EPOCH, clock=lambda: float(next(seconds)), proposer=Proposers(draft=Oracle())
    )
    target = Conversation(executor)
    first = target.reply(opening(1, sample=True, draft_length=1)).timings
    second = target.reply(row(1, [*PROMPT, 3], 5, sample=True, verify=1)).timings
    third = target.reply(row(1, [*PROMPT, 3, 4], 6, sample=True)).timings
    assert [one.drafting for one in (first, second, third)] == [1, 2, 1]
    assert [one.total for one in (first, second, third)] == [3, 4, 3]
    assert [one.idle for one in (first, second, third)] == [0, 2, 2]
