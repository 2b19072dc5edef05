"""A target's remote proposer and a real draft server, with gRPC between them and a tiny model behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from engine.drafting.draft_kv import DraftKv
from engine.drafting.model_draft import DraftEngine
from engine.drafting.model_drafting import DraftAsk, ModelDrafting
from engine.models.loading import load_draft_engine
from engine.settings import EngineSettings
from protos import draft_pb2, worker_pb2, worker_pb2_grpc
from scheduler.messages import Role
from scheduler.sampling import Grammar, SamplingParameters
from scheduler.state.digests import DigestedTokens
from services.launch.launcher import WorkerLaunch, WorkerLauncher
from services.rpc.channel_security import ChannelSecurity
from services.rpc.protocol_version import PROTOCOL_VERSION
from services.worker.drafting import frame_listener, service
from services.worker.drafting.batcher import Batcher
from services.worker.drafting.frame_listener import FrameListener
from services.worker.drafting.frames import FRAMES_METADATA_KEY, SECRET_BYTES, WELCOME, frame_of
from services.worker.drafting.limits import MAX_DRAFT_LENGTH, MAX_FRAME_BYTES, MAX_SEQUENCES
from services.worker.drafting.messages import Opened, Verdict, VerdictsOfStep
from services.worker.drafting.remote import RemoteProposer
from services.worker.drafting.target_stream import TargetStream
from tests.support.certificates import issue
from tests.support.command_line import CHARACTERS, save_tokenizer
from tests.support.draft_servers import PlayedSequence, RunningDraft, offer, running_draft, take
from tests.support.extreme_values import extreme_messages
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, tiny_model
from tests.support.waiting import LONG, wait_until

END = VOCABULARY - 1
WORDS = Grammar("start: /[ab]+c/", frozenset([END]))
A, B, C = (CHARACTERS.index(text) for text in "abc")
SAMPLINGS = (
    SamplingParameters(),
    SamplingParameters(temperature=0.8, seed=5),
    SamplingParameters(repetition_penalty=1.3, seed=6),
)
PAGE_SIZE = 4
PAGES = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    tiny_model("llama", **TORCH_SHAPE).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def load(folder: Path, **changes: Any) -> DraftEngine:
    fields = {"dtype": "float32", "threads": 1, "page_size": PAGE_SIZE, "kv_pages": PAGES, "max_num_batched_tokens": 64}
    return load_draft_engine(EngineSettings(str(folder), **(fields | changes)), lambda *_: None)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[RunningDraft]:
    with running_draft(lambda: load(folder)) as running:
        yield running


class Oracle:
    """What the draft model proposes when it is asked directly, for each sequence alone."""

    def __init__(self, folder: Path) -> None:
        self._drafting = ModelDrafting(load(folder), prefix_cache=False)
        self._kv: dict[PlayedSequence, DraftKv] = {}

    def proposal(self, one: PlayedSequence, draft_length: int) -> list[int]:
        kv = self._kv.setdefault(one, DraftKv())
        tokens = one.tokens.tokens
        while True:
            ask = DraftAsk(kv, tokens[:-1], tokens[-1:], len(one.prompt), one.sampling, draft_length)
            (answer,) = self._drafting.propose([ask])
            if not answer.behind:
                return list(answer.tokens)


def connected(proposer: RemoteProposer) -> None:
    wait_until(lambda: proposer.connected, "the target has a stream to the draft", pause=0.01)


def proposed(proposer: RemoteProposer, sequences: Sequence[PlayedSequence], most: int) -> list[list[int]]:
    """Once all of the sequences have a proposal."""
    wait_until(lambda: all(take(proposer, sequences, most)), "the draft proposes", pause=0.01)
    return take(proposer, sequences, most)


def random_prompts(draw: random.Random, count: int, length: int = 9) -> list[list[int]]:
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, length))] for _ in range(count)]


def random_sequences(seed: int, count: int, length: int = 9, first: int = 1) -> list[PlayedSequence]:
    draw = random.Random(seed)
    return [
        PlayedSequence(number, prompt, SAMPLINGS[number % len(SAMPLINGS)])
        for number, prompt in enumerate(random_prompts(draw, count, length), first)
    ]


def commit_some(draw: random.Random, one: PlayedSequence, proposal: Sequence[int]) -> None:
    """Some of the proposal, and a token that is most likely another than the draft's next one."""
    one.commit(*proposal[: draw.randint(0, len(proposal))], draw.randrange(VOCABULARY))


# Proposals are those of the model.


def test_proposals_are_the_models_over_rounds_with_rejections(running: RunningDraft, folder: Path) -> None:
    draw, oracle = random.Random(1), Oracle(folder)
    sequences = random_sequences(1, 6, 100)
    with closing(RemoteProposer(VOCABULARY)) as proposer:
        proposer.set_grant(running.grant())
        connected(proposer)
        offer(proposer, sequences, 4)  # their prompts alone
        for one in sequences:
            one.commit(draw.randrange(VOCABULARY))
        for draft_length in (4, 3, 1, 5, 4, 2, 4, 4):
            offer(proposer, sequences, draft_length)
            found = proposed(proposer, sequences, draft_length)
            assert found == [oracle.proposal(one, draft_length) for one in sequences]
            for one, proposal in zip(sequences, found, strict=True):
                commit_some(draw, one, proposal)
        # A sequence that the target has taken back a part of, as after a lost step.
        sequences[0].tokens.truncate(len(sequences[0].tokens) - 2)
        offer(proposer, sequences[:1], 4)
        assert proposed(proposer, sequences[:1], 4) == [oracle.proposal(sequences[0], 4)]


def test_targets_that_share_a_draft_may_have_equal_sequence_ids(running: RunningDraft, folder: Path) -> None:
    draw, oracle = random.Random(2), Oracle(folder)
    sequences = [random_sequences(seed, 3, 20) for seed in (2, 3)]
    with closing(RemoteProposer(VOCABULARY)) as first, closing(RemoteProposer(VOCABULARY)) as second:
        for number, proposer in enumerate((first, second)):
            proposer.set_grant(running.grant(target_id=f"target-{number}"))
            connected(proposer)
        for _ in range(4):
            for proposer, own in ((first, sequences[0]), (second, sequences[1])):
                for one in own:
                    one.commit(draw.randrange(VOCABULARY))
                offer(proposer, own, 3)
            for proposer, own in ((first, sequences[0]), (second, sequences[1])):
                assert proposed(proposer, own, 3) == [oracle.proposal(one, 3) for one in own]


def test_proposals_follow_grammars(running: RunningDraft, folder: Path) -> None:
    oracle = Oracle(folder)
    one = PlayedSequence(1, [5, 6, 7], SamplingParameters(grammar=WORDS))
    with closing(RemoteProposer(VOCABULARY)) as proposer:
        proposer.set_grant(running.grant())
        connected(proposer)
        for _ in range(3):
            one.commit(A)
            offer(proposer, [one], 3)
            (found,) = proposed(proposer, [one], 3)
            assert found == oracle.proposal(one, 3)
            assert set(found) <= {A, B, C, END}


def test_sequences_are_opened_again_where_the_draft_starts_anew(folder: Path) -> None:
    draw, oracle = random.Random(4), Oracle(folder)
    sequences = random_sequences(4, 4, 30)

    def round_of(proposer: RemoteProposer) -> None:
        for one in sequences:
            one.commit(draw.randrange(VOCABULARY))
        offer(proposer, sequences, 3)
        assert proposed(proposer, sequences, 3) == [oracle.proposal(one, 3) for one in sequences]

    with closing(RemoteProposer(VOCABULARY)) as proposer:
        with running_draft(lambda: load(folder)) as draft:
            proposer.set_grant(draft.grant())
            connected(proposer)
            round_of(proposer)
        wait_until(lambda: not proposer.connected, "the stream is lost", pause=0.01)
        report = proposer.report()
        assert report is not None
        assert not report.connected
        assert take(proposer, sequences, 3, wait_seconds=1000) == [[]] * len(sequences)
        with running_draft(lambda: load(folder)) as draft:
            proposer.set_grant(draft.grant(number=2))
            connected(proposer)
            round_of(proposer)


def test_sequences_of_one_scope_alone_share_pages(folder: Path) -> None:
    prompt = list(range(5 * PAGE_SIZE))
    scopes = b"a" * 32, b"b" * 32
    with closing(RemoteProposer(VOCABULARY)) as proposer, running_draft(lambda: load(folder)) as draft:
        proposer.set_grant(draft.grant())
        connected(proposer)

        def pages_of(sequence_id: int, scope: bytes) -> int:
            free = draft.draft.pool.free_pages
            one = PlayedSequence(sequence_id, prompt, cache_scope=scope)
            one.commit(7)
            offer(proposer, [one], 1)
            proposed(proposer, [one], 1)
            return free - draft.draft.pool.free_pages

        assert pages_of(1, scopes[0]) == 6
        assert pages_of(2, scopes[0]) == 1
        assert pages_of(3, scopes[1]) == 6


# Pages.


def test_ended_sequences_and_streams_free_their_pages(folder: Path) -> None:
    with running_draft(lambda: load(folder), prefix_cache=False) as draft:
        pool = draft.draft.pool
        with closing(RemoteProposer(VOCABULARY)) as proposer:
            proposer.set_grant(draft.grant())
            connected(proposer)
            sequences = random_sequences(5, 3, 30)
            for one in sequences:
                one.commit(1)
            offer(proposer, sequences, 2)
            proposed(proposer, sequences, 2)
            assert draft.server.sequences == 3
            for one in sequences[:2]:
                proposer.forget(one.drafting)
            sequences[2].commit(1)
            offer(proposer, sequences[2:], 2)
            proposed(proposer, sequences[2:], 2)
            assert draft.server.sequences == 1
            kept = -(-(len(sequences[2].tokens) + 1) // PAGE_SIZE)
            assert pool.free_pages == PAGES - kept
        wait_until(lambda: draft.server.sequences == 0, "the stream's sequences are gone", pause=0.01)
        wait_until(lambda: pool.free_pages == PAGES, "their pages are free", pause=0.01)


def test_pages_go_to_others_where_nobody_asks_for_a_sequence_any_more(folder: Path) -> None:
    """With pages for three of four."""
    oracle = Oracle(folder)
    sequences = [PlayedSequence(number, range(number, number + 12)) for number in range(1, 5)]
    for one in sequences:
        one.commit(1)
    with (
        closing(RemoteProposer(VOCABULARY)) as proposer,
        running_draft(lambda: load(folder, kv_pages=3 * 4), prefix_cache=False) as draft,
    ):
        proposer.set_grant(draft.grant())
        connected(proposer)
        offer(proposer, sequences[:3], 2)
        assert proposed(proposer, sequences[:3], 2) == [oracle.proposal(one, 2) for one in sequences[:3]]

        def has_proposal(one: PlayedSequence) -> bool:
            found = take(proposer, [one], 2)
            if not found[0]:
                offer(proposer, [one], 2)
            return bool(found[0])

        for one in (sequences[3], sequences[0], sequences[3]):
            wait_until(partial(has_proposal, one), "pages become free", pause=0.02)
            assert proposed(proposer, [one], 2) == [oracle.proposal(one, 2)]
        report = proposer.report()
        assert report is not None
        assert report.refused == ()


def test_sequences_without_pages_are_refused_and_others_go_on(folder: Path) -> None:
    oracle = Oracle(folder)
    sequences = [PlayedSequence(number, range(number, number + 12)) for number in range(1, 5)]
    with (
        closing(RemoteProposer(VOCABULARY)) as proposer,
        running_draft(lambda: load(folder, kv_pages=3 * 4), prefix_cache=False) as draft,
    ):
        proposer.set_grant(draft.grant())
        connected(proposer)
        for count in (3, 4, 4):
            for one in sequences[:count]:
                one.commit(1)
            offer(proposer, sequences[:count], 2)
            assert proposed(proposer, sequences[:3], 2) == [oracle.proposal(one, 2) for one in sequences[:3]]
        refused: list[int] = []
        wait_until(lambda: bool(refused.extend(proposer.report().refused) or refused), "one is refused")  # type: ignore[union-attr]
        assert refused == [4]


# Who is let in, and what. A target that keeps to the protocol meets none of these limits.


def opening(grant: worker_pb2.DraftGrant, protocol_version: int = PROTOCOL_VERSION) -> draft_pb2.DraftRequest:
    return draft_pb2.DraftRequest(opening=draft_pb2.DraftOpening(protocol_version=protocol_version, grant=grant))


class RawTarget:
    """A stream of messages that the test makes up."""

    def __init__(self, address: str, first: draft_pb2.DraftRequest | bytes) -> None:
        self._outgoing: SimpleQueue[draft_pb2.DraftRequest | bytes | None] = SimpleQueue()
        self._channel = grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)])
        call = self._channel.stream_stream(
            "/spool.v1.Drafter/Propose",
            lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            draft_pb2.Proposals.FromString,
        )
        self.answers = call(iter(self._outgoing.get, None))
        self.send(first)

    def send(self, *messages: draft_pb2.DraftRequest | bytes) -> None:
        for message in messages:
            self._outgoing.put(message)

    def end(self) -> tuple[grpc.StatusCode, str]:
        """How the draft worker ends the stream, after any answers."""
        with pytest.raises(grpc.RpcError):
            for _ in self.answers:
                pass
        return self.answers.code(), self.answers.details()

    def close(self) -> None:
        self._outgoing.put(None)
        self._channel.close()


def verdict(
    committed: Sequence[int], draft_length: int = 2, sequence_id: int = 1, **changes: Any
) -> draft_pb2.DraftRequest:
    """Opens a sequence with these tokens, of which the last was sampled."""
    digested = DigestedTokens(committed)
    parameters = worker_pb2.SequenceParameters(prompt_length=len(committed) - 1, committed_tokens=committed)
    columns = {
        "sequences": [draft_pb2.DraftSequence(sequence_id=sequence_id, parameters=parameters)],
        "sequence_ids": [sequence_id],
        "lengths": [len(committed)],
        "digests": [digested.digest(len(committed))],
        "counts": [0],
        "tokens": [],
        "draft_lengths": [draft_length],
    }
    return draft_pb2.DraftRequest(**(columns | changes))


def test_only_grants_that_hold_are_let_in(running: RunningDraft) -> None:
    def refusal(first: draft_pb2.DraftRequest) -> tuple[grpc.StatusCode, str]:
        with closing(RawTarget(running.address, first)) as target:
            return target.end()

    failed, invalid = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT
    grant = running.grant(target_id="fenced", scheduler_epoch=7, number=3)
    code, said = refusal(opening(grant, PROTOCOL_VERSION + 1))
    assert code is failed
    assert str(PROTOCOL_VERSION + 1) in said
    assert str(PROTOCOL_VERSION) in said
    other = worker_pb2.DraftGrant()
    other.CopyFrom(grant)
    other.draft_epoch += 1
    code, said = refusal(opening(other))
    assert code is failed
    assert f"draft_epoch is {grant.draft_epoch + 1}, must be {grant.draft_epoch}" in said
    assert refusal(verdict([1, 2])) == (invalid, "opening is absent, must be in the first message of a stream")
    assert refusal(opening(running.grant(target_id="")))[0] is invalid
    with closing(RawTarget(running.address, opening(grant))) as first:
        first.send(verdict([1, 2]))
        assert next(first.answers).counts == [2]
        for number, epoch in ((2, 7), (9, 6)):
            code, said = refusal(opening(running.grant(number, "fenced", epoch)))
            assert code is failed
            assert f"scheduler_epoch {epoch} and number {number}" in said
        # The same grant again, as after a stream that broke: the target's earlier stream ends.
        with closing(RawTarget(running.address, opening(grant))) as second:
            assert first.end()[0] is failed
            second.send(verdict([1, 2]))
            assert next(second.answers).counts == [2]
            second.send(opening(grant))
            assert second.end()[0] is invalid
        for number, epoch in ((4, 7), (1, 8)):
            with closing(RawTarget(running.address, opening(running.grant(number, "fenced", epoch)))) as later:
                later.send(verdict([1, 2]))
                assert next(later.answers).counts == [2]


def test_limits_of_requests(running: RunningDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    invalid, exhausted = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
    scope = {"prompt_length": 1, "committed_tokens": [1, 2]}

    def scoped(size: int) -> draft_pb2.DraftRequest:
        parameters = worker_pb2.SequenceParameters(**scope, cache_scope=bytes(size))  # type: ignore[arg-type]
        return verdict([1, 2], sequences=[draft_pb2.DraftSequence(sequence_id=1, parameters=parameters)])

    def many(count: int) -> draft_pb2.DraftRequest:
        ones, none = [1] * count, [0] * count
        return draft_pb2.DraftRequest(
            sequence_ids=range(count), lengths=ones, digests=ones, counts=none, draft_lengths=none
        )

    cases = [
        (verdict([1, 2], MAX_DRAFT_LENGTH), verdict([1, 2], MAX_DRAFT_LENGTH + 1), invalid, "draft_lengths is 65"),
        (verdict([1, VOCABULARY - 1]), verdict([1, VOCABULARY]), invalid, f"committed_tokens holds {VOCABULARY}, must"),
        (verdict([1, 2]), verdict([1, 2], counts=[1], tokens=[VOCABULARY]), invalid, f"tokens holds {VOCABULARY}"),
        (verdict([1, 2]), verdict([1, 2], counts=[3], tokens=[1, 2, 3]), invalid, "lengths holds 2, must be at least"),
        (verdict([1, 2]), verdict([1, 2], lengths=[1]), invalid, "committed_tokens is 2, must be at most 1"),
        (verdict([1, 2]), verdict([1, 2], counts=[1]), invalid, "tokens has 0 entries, must have 1"),
        (verdict([1, 2]), verdict([1, 2], digests=[]), invalid, "digests has 0 entries, must have 1"),
        (verdict([1, 2]), verdict([1, 2], sequence_ids=[2]), invalid, "sequences holds an id that is not"),
        (scoped(32), scoped(33), invalid, "cache_scope has 33 bytes, must have none or 32"),
        (many(MAX_SEQUENCES), many(MAX_SEQUENCES + 1), exhausted, "sequence_ids is 4097, must be at most 4096"),
        (verdict([1, 2]), bytes([8]), invalid, "cannot be read"),
        (verdict([1, 2]), bytes([0x12]) + bytes(MAX_FRAME_BYTES), exhausted, ""),
    ]
    for number, (at_limit, beyond, code, said) in enumerate(cases):
        with closing(RawTarget(running.address, opening(running.grant(target_id=f"limit-{number}")))) as target:
            target.send(at_limit)
            answer = next(target.answers)
            assert answer.counts or len(answer.unknown_ids) == MAX_SEQUENCES
            target.send(beyond)
            ended = target.end()
            assert ended[0] is code
            assert said in ended[1]
    # What is too long for the draft may be a healthy target's: it is refused alone.
    longest = running.draft.description.max_sequence_length
    with closing(RawTarget(running.address, opening(running.grant(target_id="longest")))) as target:
        target.send(verdict([1] * longest))
        assert next(target.answers).counts == [1]
        target.send(verdict([1] * (longest + 1), sequence_id=2))
        assert next(target.answers).refused_ids == [2]
        target.send(verdict([1, 2], sequence_id=3))
        assert next(target.answers).counts == [2]


def test_only_so_many_targets_are_let_in_and_none_while_the_worker_drains(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_STREAMS", 2)
    with running_draft(lambda: load(folder)) as draft, ExitStack() as targets:

        def target(number: int) -> RawTarget:
            first = opening(draft.grant(target_id=f"target-{number}"))
            return targets.enter_context(closing(RawTarget(draft.address, first)))

        def serves(one: RawTarget) -> bool:
            one.send(verdict([1, 2]))
            return list(next(one.answers).counts) == [2]

        first, second = target(1), target(2)
        assert serves(first)
        assert serves(second)
        code, said = target(3).end()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "streams is 3, must be at most 2" in said
        # Another stream of a target takes the place of the one before.
        third = target(2)
        assert second.end()[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert serves(third)

        draining = asyncio.run_coroutine_threadsafe(draft.server.drain(None), draft.loop)
        # Its scheduler has given all targets that use it to others by now.
        assert first.end()[0] is third.end()[0] is grpc.StatusCode.UNAVAILABLE
        assert draining.result(LONG) == 0
        assert target(1).end()[0] is grpc.StatusCode.UNAVAILABLE


def test_schedulers_get_signs_of_life_alone(folder: Path) -> None:
    ok, invalid = worker_pb2.STEP_STATUS_OK, worker_pb2.STEP_STATUS_INVALID
    with running_draft(lambda: load(folder)) as draft, grpc.insecure_channel(draft.address) as channel:
        stub, epoch = worker_pb2_grpc.WorkerStub(channel), draft.server.worker_epoch
        description = stub.Describe(worker_pb2.DescribeRequest(protocol_version=PROTOCOL_VERSION))
        assert (description.role, description.worker_epoch) == (worker_pb2.ROLE_DRAFT, epoch)
        assert (description.vocabulary_size, description.free_pages) == (VOCABULARY, PAGES)
        cases = [
            ({"worker_epoch": epoch, "scheduler_epoch": 5}, ok, ""),
            ({"worker_epoch": epoch + 1, "scheduler_epoch": 5}, worker_pb2.STEP_STATUS_WRONG_EPOCH, "worker_epoch"),
            ({"worker_epoch": epoch, "scheduler_epoch": 4}, worker_pb2.STEP_STATUS_FENCED, "scheduler_epoch is 4"),
            ({"worker_epoch": epoch, "scheduler_epoch": 5, "step_id": 1}, invalid, "step_id is 1, must be 0"),
            ({"worker_epoch": epoch, "scheduler_epoch": 5, "rows": [worker_pb2.Row()]}, invalid, "must be 0 without"),
            ({"worker_epoch": epoch, "scheduler_epoch": 6}, ok, ""),
            ({"worker_epoch": epoch, "scheduler_epoch": 5}, worker_pb2.STEP_STATUS_FENCED, "scheduler_epoch is 5"),
        ]
        replies = stub.Steps(iter([worker_pb2.StepRequest(**fields) for fields, _, _ in cases]))
        for reply, (_, status, said) in zip(replies, cases, strict=True):
            assert reply.status == status
            assert said in reply.error
        assert draft.server.highest_epoch == 6
        with pytest.raises(grpc.RpcError) as refused:
            stub.ImportKv(worker_pb2.ImportKvRequest())
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]


def test_targets_prove_that_they_belong_to_the_cell(folder: Path, tmp_path: Path) -> None:
    security = issue(tmp_path, "127.0.0.1", token="sixteen-characters-or-more")
    strangers = ChannelSecurity(), replace(security, token="another-of-as-many-characters")
    one = PlayedSequence(1, [3, 4])
    one.commit(5)
    with running_draft(lambda: load(folder), security=security) as draft:
        for stranger in strangers:
            with closing(RemoteProposer(VOCABULARY, stranger)) as proposer:
                proposer.set_grant(draft.grant())
                wait_until(lambda: not proposer.report().connected, "the stranger is refused")  # type: ignore[union-attr]
        with closing(RemoteProposer(VOCABULARY, security)) as proposer:
            proposer.set_grant(draft.grant())
            connected(proposer)
            offer(proposer, [one], 2)
            assert proposed(proposer, [one], 2) == [Oracle(folder).proposal(one, 2)]


def test_no_request_hurts_the_draft_or_other_targets(running: RunningDraft, folder: Path) -> None:
    """Extreme values, columns at random, and bytes at random, each on a stream of its own."""
    draw = random.Random(8)
    whole = verdict([1, 2, 3])
    whole.sequences[0].parameters.sampling.CopyFrom(
        worker_pb2.SamplingParameters(top_p=1, repetition_penalty=1, grammar=worker_pb2.Grammar(definition="start: A"))
    )
    whole.closed_ids.append(2)
    messages: list[draft_pb2.DraftRequest | bytes] = [*extreme_messages(whole, 8, 100)]  # type: ignore[list-item]
    for _ in range(100):
        size = draw.randint(0, 3)
        tokens = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 9))]
        message = verdict(tokens, draw.randint(0, 9), draw.randint(0, 3))
        for name in ("sequence_ids", "lengths", "counts", "tokens", "draft_lengths", "closed_ids"):
            if draw.random() < 0.2:
                message.ClearField(name)
                getattr(message, name).extend(draw.choices((0, 1, 2, 3, 99, 2**32 - 1), k=size))
        messages.append(message)
    messages += [draw.randbytes(draw.randint(1, 60)) for _ in range(100)]
    one, oracle = PlayedSequence(1, [3, 4]), Oracle(folder)
    with closing(RemoteProposer(VOCABULARY)) as proposer:
        proposer.set_grant(running.grant(target_id="healthy"))
        connected(proposer)
        for number, message in enumerate(messages):
            with closing(RawTarget(running.address, opening(running.grant(target_id="strange")))) as strange:
                strange.send(verdict([5, 6], sequence_id=3), message, verdict([5, 6], sequence_id=4))
                answered: set[int] = set()
                try:
                    while 4 not in answered:
                        answered.update(next(strange.answers).sequence_ids)
                except (grpc.RpcError, StopIteration):
                    code = strange.answers.code()
                    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED), message
            if number % 10 == 0:
                one.commit(number % VOCABULARY)
                offer(proposer, [one], 2)
                assert proposed(proposer, [one], 2) == [oracle.proposal(one, 2)]
        report = proposer.report()
        assert report is not None
        assert report.connected
        assert report.refused == ()


def frames_of(target: RawTarget) -> tuple[socket.socket, bytes]:
    """A connection to where the draft worker wants the target's frames, and the secret that it wants first."""
    offered = dict(target.answers.initial_metadata())[FRAMES_METADATA_KEY]
    port, secret = offered.split()
    connection = socket.create_connection(("127.0.0.1", int(port)), LONG)
    return connection, bytes.fromhex(secret)


def ended(connection: socket.socket) -> bool:
    """Waits for the draft worker to close it."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_only_streams_that_were_let_in_have_connections_for_frames(running: RunningDraft) -> None:
    draw = random.Random(9)
    with closing(RawTarget(running.address, opening(running.grant(target_id="frames")))) as target:
        connection, secret = frames_of(target)
        with connection:
            connection.sendall(draw.randbytes(SECRET_BYTES))
            assert ended(connection)
        connection, _ = frames_of(target)
        with connection:
            connection.sendall(secret)
            assert connection.recv(4, socket.MSG_WAITALL) == WELCOME
            # It counts once.
            again, _ = frames_of(target)
            with again:
                again.sendall(secret)
                assert ended(again)
            connection.sendall(frame_of(verdict([1, 2])))
            size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
            answer = draft_pb2.Proposals.FromString(connection.recv(size, socket.MSG_WAITALL))
            assert list(answer.counts) == [2]
        assert target.end()[0] is grpc.StatusCode.UNAVAILABLE


def test_only_so_many_connections_may_keep_their_secret_to_themselves(
    running: RunningDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_listener, "MAX_STREAMS", 1)
    with closing(RawTarget(running.address, opening(running.grant(target_id="frames")))) as target:
        silent, _ = frames_of(target)
        refused, _ = frames_of(target)
        with refused:
            assert ended(refused)
        silent.close()

        def welcome() -> bool:
            connection, secret = frames_of(target)
            with connection, contextlib.suppress(ConnectionError):
                connection.sendall(secret)
                return connection.recv(4, socket.MSG_WAITALL) == WELCOME
            return False

        wait_until(welcome, "the target is let in", pause=0.01)


async def test_a_stream_that_waits_for_room_ends_with_its_target(folder: Path) -> None:
    draft = load(folder)
    with ThreadPoolExecutor(1) as thread:
        batcher, stream = Batcher(ModelDrafting(draft, False), draft.pool, thread), TargetStream("target-0")
        for _ in range(100):
            stream.answers.put_nowait(draft_pb2.Proposals())
        waiting = asyncio.create_task(stream.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        batcher.close(stream)
        await asyncio.wait_for(waiting, LONG)


def test_a_batch_may_outlive_its_server(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    draft, gate = load(folder), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(gate.wait)
        batcher, tokens = Batcher(ModelDrafting(draft, False), draft.pool, thread), DigestedTokens([1, 2])
        opened = Opened(1, SamplingParameters(), b"", [1, 2])

        async def serve() -> None:
            step = VerdictsOfStep(1, (), [Verdict(1, 2, tokens.digest(2), (), 2, opened)])
            batcher.add(TargetStream("target-0"), step)

        asyncio.run(serve())
        gate.set()
    assert batcher.running_seconds() is None
    assert batcher.busy_seconds > 0
    assert not caplog.records


def test_no_frame_hurts_the_draft_or_other_targets(running: RunningDraft, folder: Path) -> None:
    draw = random.Random(10)
    invalid, exhausted = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
    cases = [
        (frame_of(opening(running.grant(target_id="frames"))), {invalid}),
        (frame_of(verdict([1, VOCABULARY])), {invalid}),
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "big"), {exhausted}),
        *(
            (len(data).to_bytes(4, "big") + data, {invalid, grpc.StatusCode.UNAVAILABLE})
            for data in (draw.randbytes(draw.randint(1, 60)) for _ in range(50))
        ),
        *((draw.randbytes(60), {invalid, exhausted, grpc.StatusCode.UNAVAILABLE}) for _ in range(50)),
    ]
    for data, codes in cases:
        with closing(RawTarget(running.address, opening(running.grant(target_id="frames")))) as target:
            connection, secret = frames_of(target)
            with connection:
                connection.sendall(secret + data)
                connection.shutdown(socket.SHUT_WR)
                assert target.end()[0] in codes
                while connection.recv(1 << 16):
                    pass
    one = PlayedSequence(1, [3, 4])
    one.commit(5)
    with closing(RemoteProposer(VOCABULARY)) as proposer:
        proposer.set_grant(running.grant(target_id="healthy"))
        connected(proposer)
        offer(proposer, [one], 2)
        assert proposed(proposer, [one], 2) == [Oracle(folder).proposal(one, 2)]


def test_frames_that_do_not_get_through_go_by_grpc(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a network policy knows one port only."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(FrameListener, "offer", lambda self, stream: f"{port} {'00' * SECRET_BYTES}")
    draw, oracle, sequences = random.Random(11), Oracle(folder), random_sequences(11, 3)
    with closing(RemoteProposer(VOCABULARY)) as proposer, running_draft(lambda: load(folder)) as draft:
        proposer.set_grant(draft.grant())
        connected(proposer)
        assert "by gRPC alone" in caplog.text
        for _ in range(3):
            for one in sequences:
                one.commit(draw.randrange(VOCABULARY))
            offer(proposer, sequences, 2)
            assert proposed(proposer, sequences, 2) == [oracle.proposal(one, 2) for one in sequences]


@pytest.mark.slow
async def test_a_draft_process_that_is_stopped_is_lost_and_serves_again_when_it_goes_on(folder: Path) -> None:
    settings = {"model": str(folder), "dtype": "float32", "threads": 1, "kv_pages": PAGES}
    oracle, one = Oracle(folder), PlayedSequence(1, [3, 4])
    async with WorkerLauncher([WorkerLaunch(Role.DRAFT, settings)]) as launcher:
        worker = launcher.workers[0]
        with grpc.insecure_channel(worker.address) as channel:
            request = worker_pb2.DescribeRequest(protocol_version=PROTOCOL_VERSION)
            epoch = worker_pb2_grpc.WorkerStub(channel).Describe(request).worker_epoch
        grant = worker_pb2.DraftGrant(address=worker.address, draft_epoch=epoch, number=1, target_id="target-0")
        with closing(RemoteProposer(VOCABULARY)) as proposer:
            proposer.set_grant(grant)

            def round_of() -> None:
                connected(proposer)
                one.commit(5)
                offer(proposer, [one], 2)
                assert proposed(proposer, [one], 2) == [oracle.proposal(one, 2)]

            round_of()
            os.kill(worker.process_id, signal.SIGSTOP)
            one.commit(6)
            offer(proposer, [one], 2)
            # The wait ends with the stream.
            assert take(proposer, [one], 2, wait_seconds=1000) == [[]]
            assert not proposer.connected
            os.kill(worker.process_id, signal.SIGCONT)
            round_of()
