"""Who is let in by a draft worker, and what: a target that keeps to the protocol meets none of these limits."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from spool.engine.drafting.model_draft import DraftEngine
from spool.engine.models.loading import load_draft_engine
from spool.engine.settings import EngineSettings
from spool.protos import draft_pb2, worker_pb2, worker_pb2_grpc
from spool.scheduler.state.digests import EMPTY_DIGEST
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.rpc.protocol_version import SPOKEN
from spool.services.worker.drafting import frame_listener, service
from spool.services.worker.drafting.frames import SECRET_BYTES
from spool.services.worker.drafting.limits import MAX_DRAFT_LENGTH, MAX_FRAME_BYTES, MAX_OPENED_TOKENS, MAX_SEQUENCES
from spool.services.worker.drafting.messages import VerdictsOfStep
from spool.services.worker.drafting.remote import RemoteProposer
from spool.services.worker.drafting.target_stream import TargetStream
from tests.support.certificates import issue
from tests.support.draft_servers import PlayedSequence, RunningDraft, offer, running_draft, take
from tests.support.extreme_values import extreme_messages
from tests.support.raw_targets import Message, RawTarget, opening, verdict
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, tiny_model
from tests.support.waiting import LONG, wait_until

PAGES = 50
INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
FAILED, UNAVAILABLE = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    tiny_model("llama", **TORCH_SHAPE).save_pretrained(folder)
    return folder


def load(folder: Path) -> DraftEngine:
    settings = EngineSettings(str(folder), dtype="float32", threads=1, page_size=16, kv_pages=PAGES)
    return load_draft_engine(settings, lambda *_: None)


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[RunningDraft]:
    with running_draft(lambda: load(folder)) as running:
        yield running


@pytest.fixture(params=["gRPC", "frames"])
def frames(request: pytest.FixtureRequest) -> bool:
    return request.param == "frames"


def serves(target: RawTarget) -> bool:
    target.send(verdict([1, 2]))
    return list(next(target.answers).counts) == [2]


class Healthy:
    """A target that is served all the time, always alike."""

    def __init__(self, draft: RunningDraft, security: ChannelSecurity | None = None) -> None:
        self.proposer = RemoteProposer(VOCABULARY, security)
        self.proposer.set_grant(draft.grant(target_id="healthy"))
        wait_until(lambda: self.proposer.connected, "the target has a stream to the draft", pause=0.01)
        self._sequences = 0
        self._first = self._proposal()

    def check(self) -> None:
        assert self._proposal() == self._first
        report = self.proposer.report()
        assert report is not None
        assert report.connected
        assert report.refused == ()

    def _proposal(self) -> list[list[int]]:
        self._sequences += 1
        one = PlayedSequence(self._sequences, [3, 4])
        one.commit(5)
        offer(self.proposer, [one], 2)
        wait_until(lambda: bool(take(self.proposer, [one], 2)[0]), "the draft proposes", pause=0.001)
        return take(self.proposer, [one], 2)

    def close(self) -> None:
        self.proposer.close()


def test_a_sequence_that_comes_twice_in_a_step_leaves_no_pages(folder: Path) -> None:
    with running_draft(lambda: load(folder), prefix_cache=False, ahead=True) as draft:
        with closing(RawTarget(draft.address, opening(draft.grant()))) as target:
            step = verdict([1, 2, 3], 3, step_seconds=1000)
            for tokens in ([1, 2, 4], [1, 2, 3, 5]):
                step.MergeFrom(verdict(tokens, 3))
            for _ in range(3):
                target.send(step)
                next(target.answers)
        wait_until(lambda: draft.draft.pool.free_pages == PAGES, "all pages are free", pause=0.01)


def test_only_grants_that_hold_are_let_in(running: RunningDraft) -> None:
    def refusal(first: draft_pb2.DraftRequest) -> tuple[grpc.StatusCode, str]:
        with closing(RawTarget(running.address, first)) as target:
            return target.end()

    grant = running.grant(target_id="fenced", scheduler_epoch=7, number=3)
    code, said = refusal(opening(grant, SPOKEN.newest + 1))
    assert code is FAILED
    assert str(SPOKEN.newest + 1) in said
    assert str(SPOKEN.newest) in said
    other = worker_pb2.DraftGrant()
    other.CopyFrom(grant)
    other.draft_epoch += 1
    code, said = refusal(opening(other))
    assert code is FAILED
    assert f"draft_epoch is {grant.draft_epoch + 1}, must be {grant.draft_epoch}" in said
    assert refusal(verdict([1, 2])) == (INVALID, "opening is absent, must be in the first message of a stream")
    assert refusal(opening(running.grant(target_id="")))[0] is INVALID
    with closing(RawTarget(running.address, opening(grant))) as first:
        assert serves(first)
        for number, epoch in ((2, 7), (9, 6)):
            code, said = refusal(opening(running.grant(number, "fenced", epoch)))
            assert code is FAILED
            assert f"scheduler_epoch {epoch} and number {number}" in said
        # The same grant again, as after a stream that broke: the target's earlier stream ends.
        with closing(RawTarget(running.address, opening(grant))) as second:
            assert first.end()[0] is FAILED
            assert serves(second)
        for number, epoch in ((4, 7), (1, 8)):
            with closing(RawTarget(running.address, opening(running.grant(number, "fenced", epoch)))) as later:
                assert serves(later)


def test_limits_of_requests(running: RunningDraft, frames: bool) -> None:
    def many(count: int) -> draft_pb2.DraftRequest:
        ones, none = [1] * count, [0] * count
        return draft_pb2.DraftRequest(
            sequence_ids=range(count), lengths=ones, digests=ones, counts=none, draft_lengths=none
        )

    fine = verdict([1, 2])
    cases: list[tuple[Message, Message, grpc.StatusCode, str]] = [
        (verdict([1, 2], MAX_DRAFT_LENGTH), verdict([1, 2], MAX_DRAFT_LENGTH + 1), INVALID, "draft_lengths is 65"),
        (verdict([1, VOCABULARY - 1]), verdict([1, VOCABULARY]), INVALID, f"committed_tokens holds {VOCABULARY}, must"),
        (fine, verdict([1, 2], counts=[1], tokens=[VOCABULARY]), INVALID, f"tokens holds {VOCABULARY}"),
        (fine, verdict([1, 2], counts=[1]), INVALID, "tokens has 0 entries, must have 1"),
        (fine, verdict([1, 2], digests=[]), INVALID, "digests has 0 entries, must have 1"),
        (many(MAX_SEQUENCES), many(MAX_SEQUENCES + 1), EXHAUSTED, "sequence_ids is 4097, must be at most 4096"),
        (fine, opening(running.grant()), INVALID, "opening came again"),
        (fine, bytes([8]), INVALID, "cannot be read"),
        (fine, bytes([0x12]) + bytes(MAX_FRAME_BYTES), EXHAUSTED, ""),
    ]
    for number, (at_limit, beyond, code, said) in enumerate(cases):
        grant = running.grant(target_id=f"limit-{number}")
        with closing(RawTarget(running.address, opening(grant), frames)) as target:
            target.send(at_limit)
            next(target.answers)
            target.send(beyond)
            ended = target.end()
            assert ended[0] is code, said
            assert said in ended[1]


def test_what_a_draft_can_do_nothing_for_is_refused_alone(running: RunningDraft) -> None:
    longest = running.draft.description.max_sequence_length
    within_prompt = verdict([1, 2], sequence_id=4)
    within_prompt.sequences[0].parameters.prompt_length = 2
    with closing(RawTarget(running.address, opening(running.grant(target_id="longest")))) as target:
        target.send(verdict([1] * longest))
        assert next(target.answers).counts == [1]
        for beyond in (verdict([1] * (longest + 1), sequence_id=2), within_prompt):
            target.send(beyond)
            assert next(target.answers).refused_ids == beyond.sequence_ids
        nothing = {"lengths": [0], "digests": [EMPTY_DIGEST], "draft_lengths": [0]}
        for wrong in ({"counts": [3], "tokens": [1, 2, 3]}, {"lengths": [1]}, nothing, {"digests": [1]}):
            target.send(verdict([1, 2], **wrong))
            assert next(target.answers).unknown_ids == [1]
        assert serves(target)


def test_only_so_many_sequences_are_held(running: RunningDraft) -> None:
    with closing(RawTarget(running.address, opening(running.grant(target_id="many")))) as target:
        for first in range(0, MAX_SEQUENCES, 64):
            request = draft_pb2.DraftRequest()
            for sequence_id in range(first, first + 64):
                request.MergeFrom(verdict([1, 2], 0, sequence_id))
            target.send(request)
        answered: set[int] = set()
        while len(answered) < MAX_SEQUENCES:
            answered.update(next(target.answers).sequence_ids)
        assert running.server.sequences == MAX_SEQUENCES
        target.send(verdict([1, 2], sequence_id=MAX_SEQUENCES))
        assert target.end()[0] is EXHAUSTED
    wait_until(lambda: running.server.sequences == 0, "the sequences are gone", pause=0.01)


def test_only_so_many_targets_are_let_in_and_none_while_the_worker_drains(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_STREAMS", 2)
    with running_draft(lambda: load(folder)) as draft, ExitStack() as targets:

        def target(number: int) -> RawTarget:
            first = opening(draft.grant(target_id=f"target-{number}"))
            return targets.enter_context(closing(RawTarget(draft.address, first)))

        first, second = target(1), target(2)
        assert serves(first)
        assert serves(second)
        code, said = target(3).end()
        assert code is EXHAUSTED
        assert "streams is 3, must be at most 2" in said
        # Another stream of a target takes the place of the one before.
        third = target(2)
        assert second.end()[0] is FAILED
        assert serves(third)

        draining = asyncio.run_coroutine_threadsafe(draft.server.drain(None), draft.loop)
        # Its scheduler has given all targets that use it to others by now.
        assert first.end()[0] is third.end()[0] is UNAVAILABLE
        assert draining.result(LONG) == 0
        assert target(1).end()[0] is UNAVAILABLE


def test_schedulers_get_signs_of_life_alone(folder: Path) -> None:
    ok, invalid = worker_pb2.STEP_STATUS_OK, worker_pb2.STEP_STATUS_INVALID
    with running_draft(lambda: load(folder)) as draft, grpc.insecure_channel(draft.address) as channel:
        stub, epoch = worker_pb2_grpc.WorkerStub(channel), draft.server.worker_epoch
        description = stub.Describe(worker_pb2.DescribeRequest(protocol_version=SPOKEN.newest))
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
    with running_draft(lambda: load(folder), security=security) as draft:
        for stranger in strangers:
            with closing(RemoteProposer(VOCABULARY, stranger)) as proposer:
                proposer.set_grant(draft.grant())
                wait_until(lambda: not proposer.report().connected, "the stranger is refused")  # type: ignore[union-attr]
        with closing(Healthy(draft, security)) as healthy:
            healthy.check()


@pytest.mark.sampled(2, 1)
def test_no_request_hurts_the_draft_or_other_targets(running: RunningDraft, frames: bool) -> None:
    """Extreme values, columns at random, and bytes at random, each on a stream of its own."""
    draw = random.Random(8)
    whole = verdict([1, 2, 3])
    whole.sequences[0].parameters.sampling.CopyFrom(
        worker_pb2.SamplingParameters(top_p=1, repetition_penalty=1, grammar=worker_pb2.Grammar(definition="start: A"))
    )
    whole.closed_ids.append(2)
    messages: list[Message] = [*extreme_messages(whole, 8, 100)]  # type: ignore[list-item]
    for _ in range(100):
        size = draw.randint(0, 3)
        tokens = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 9))]
        message = verdict(tokens, draw.randint(0, 9), draw.randint(0, 3))
        for name in ("sequence_ids", "lengths", "counts", "tokens", "draft_lengths", "closed_ids"):
            if draw.random() < 0.2:
                message.ClearField(name)
                getattr(message, name).extend(draw.choices((0, 1, 2, 3, 99, 2**32 - 1), k=size))
        if draw.random() < 0.2:
            message.MergeFrom(message)
        messages.append(message)
    messages += [draw.randbytes(draw.randint(1, 60)) for _ in range(100)]
    with closing(Healthy(running)) as healthy:
        for number, message in enumerate(messages):
            with closing(RawTarget(running.address, opening(running.grant(target_id="strange")), frames)) as strange:
                strange.send(verdict([5, 6], sequence_id=3), message, verdict([5, 6], sequence_id=4))
                answered: set[int] = set()
                try:
                    while 4 not in answered:
                        answered.update(next(strange.answers).sequence_ids)
                except (grpc.RpcError, StopIteration):
                    assert strange.call.code() in (INVALID, EXHAUSTED), message
            if number % 10 == 0:
                healthy.check()


# Connections for frames.


def ended(connection: socket.socket) -> bool:
    """Waits for the draft worker to close it."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_only_streams_that_were_let_in_have_connections_for_frames(running: RunningDraft) -> None:
    draw = random.Random(9)
    with closing(RawTarget(running.address, opening(running.grant(target_id="stranger")))) as target:
        connection, _ = target.connect()
        with connection:
            connection.sendall(draw.randbytes(SECRET_BYTES))
            assert ended(connection)
    with closing(RawTarget(running.address, opening(running.grant(target_id="frames")), frames=True)) as target:
        # It counts once.
        connection, secret = target.connect()
        with connection:
            connection.sendall(secret)
            assert ended(connection)
        assert serves(target)
        assert target.connection is not None
        target.connection.shutdown(socket.SHUT_WR)
        assert target.end()[0] is UNAVAILABLE


def test_only_so_many_connections_may_keep_their_secret_to_themselves(
    running: RunningDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_listener, "MAX_STREAMS", 1)
    with closing(RawTarget(running.address, opening(running.grant(target_id="frames")))) as target:
        silent, _ = target.connect()
        refused, _ = target.connect()
        with refused:
            assert ended(refused)
        silent.close()

        def welcome() -> bool:
            connection, secret = target.connect()
            with connection, contextlib.suppress(ConnectionError):
                connection.sendall(secret)
                return bool(connection.recv(4, socket.MSG_WAITALL))
            return False

        wait_until(welcome, "the target is let in", pause=0.01)


def test_bytes_that_are_no_frames_hurt_nobody(running: RunningDraft) -> None:
    draw = random.Random(10)
    cases = [(MAX_FRAME_BYTES + 1).to_bytes(4, "big"), *(draw.randbytes(draw.randint(1, 60)) for _ in range(50))]
    with closing(Healthy(running)) as healthy:
        for data in cases:
            target = RawTarget(running.address, opening(running.grant(target_id="frames")), frames=True)
            with closing(target):
                assert target.connection is not None
                target.connection.sendall(data)
                target.connection.shutdown(socket.SHUT_WR)
                assert target.end()[0] in (INVALID, EXHAUSTED, UNAVAILABLE)
        healthy.check()


@pytest.mark.sampled(2, 1)
def test_a_target_that_reads_nothing_loses_what_it_holds_with_its_stream(running: RunningDraft, frames: bool) -> None:
    """Also where answers to it cannot be written, and it sends no end."""
    grant = running.grant(target_id="deaf")
    with closing(RawTarget(running.address, opening(grant), frames)) as deaf, closing(Healthy(running)) as healthy:
        assert serves(deaf)
        if deaf.connection is not None:
            deaf.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connection.settimeout(0.5)
        # Each of them is answered as unknown.
        none, ones = [0] * MAX_SEQUENCES, [1] * MAX_SEQUENCES
        unknown = draft_pb2.DraftRequest(
            sequence_ids=range(2, MAX_SEQUENCES + 2), lengths=ones, digests=ones, counts=none, draft_lengths=none
        )
        with contextlib.suppress(TimeoutError):
            for _ in range(150):
                deaf.send(unknown)
        healthy.check()
        # The target tries again, on another stream.
        with closing(RawTarget(running.address, opening(grant))) as again:
            assert serves(again)
            wait_until(lambda: running.server.sequences == 3, "only what others hold is left", pause=0.01)


async def test_no_more_is_read_while_many_messages_or_many_tokens_wait() -> None:
    freed: list[TargetStream] = []
    stream = TargetStream("target-0", freed.append)
    tokens = VerdictsOfStep((), (), MAX_OPENED_TOKENS)
    await stream.room()
    stream.note(tokens, taken=False)
    waiting = asyncio.create_task(stream.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.note(tokens, taken=True)
    await asyncio.wait_for(waiting, LONG)
    for _ in range(100):
        stream.answers.put_nowait(draft_pb2.Proposals())
    waiting = asyncio.create_task(stream.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.end(None)
    await asyncio.wait_for(waiting, LONG)
    assert freed == [stream]
