"""A target's remote proposer and a real draft server, with gRPC between them and a tiny model behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from spool.engine.drafting.draft_kv import DraftKv
from spool.engine.drafting.model_draft import DraftEngine
from spool.engine.drafting.model_drafting import DraftAsk, ModelDrafting
from spool.engine.models.loading import load_draft_engine
from spool.engine.settings import EngineSettings
from spool.protos import draft_pb2, draft_pb2_grpc, worker_pb2, worker_pb2_grpc
from spool.scheduler.messages import Role
from spool.scheduler.sampling import Grammar, SamplingParameters
from spool.scheduler.state.digests import DigestedTokens
from spool.services.launch.launcher import WorkerLaunch, WorkerLauncher
from spool.services.rpc.conversion import to_wire
from spool.services.rpc.protocol_version import SPOKEN
from spool.services.worker.drafting.batcher import Batcher
from spool.services.worker.drafting.frame_listener import FrameListener
from spool.services.worker.drafting.frames import SECRET_BYTES
from spool.services.worker.drafting.messages import Opened, Verdict, VerdictsOfStep
from spool.services.worker.drafting.remote import RemoteProposer
from spool.services.worker.drafting.target_stream import TargetStream
from tests.support.command_line import CHARACTERS, save_tokenizer
from tests.support.draft_servers import PlayedSequence, RunningDraft, offer, running_draft, take
from tests.support.tiny_models import TORCH_SHAPE, VOCABULARY, tiny_model
from tests.support.waiting import wait_until

END = VOCABULARY - 1
WORDS = Grammar("start: /[ab]+c/", frozenset([END]))
A, B, C = (CHARACTERS.index(text) for text in "abc")
SAMPLINGS = (
    SamplingParameters(),
    SamplingParameters(temperature=0.8, seed=5),
    SamplingParameters(repetition_penalty=1.3, seed=6),
)
PAGE_SIZE = 16
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


@pytest.fixture(scope="module", params=[False, True], ids=["asked", "ahead"])
def running(folder: Path, request: pytest.FixtureRequest) -> Iterator[RunningDraft]:
    with running_draft(lambda: load(folder), ahead=request.param) as running:
        yield running


class Oracle:
    """What the draft model proposes when it is asked directly, for each sequence alone."""

    def __init__(self, folder: Path) -> None:
        self._drafting = ModelDrafting(load(folder), prefix_cache=False)
        self._kv: dict[PlayedSequence, DraftKv] = {}

    @property
    def has_room(self) -> bool:
        """It keeps the pages of all that it was asked for."""
        return self._drafting.free_pages > PAGES // 2

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


def proposed(
    proposer: RemoteProposer, sequences: Sequence[PlayedSequence], most: int, ahead: bool = False
) -> list[list[int]]:
    """Once all of the sequences have a proposal; of a draft that goes `ahead`, some of them."""
    there = any if ahead else all
    wait_until(lambda: there(take(proposer, sequences, most)), "the draft proposes", pause=0.01)
    return take(proposer, sequences, most)


def beginnings(wholes: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """As much of each as was found: what is proposed ahead may be less than what is asked for."""
    return [whole[: len(one)] for whole, one in zip(wholes, found, strict=True)]


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


@pytest.mark.parametrize("carrier", ["frames", "gRPC"])
def test_proposals_are_the_models_over_rounds_with_rejections(
    running: RunningDraft, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, carrier: str
) -> None:
    """Where frames do not get through, as where a network policy knows one port only, all goes by gRPC."""
    if carrier == "gRPC":
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        monkeypatch.setattr(FrameListener, "offer", lambda self, stream: f"{port} {'00' * SECRET_BYTES}")
    draw, oracle = random.Random(1), Oracle(folder)
    sequences = random_sequences(1, 6, 100)
    with closing(RemoteProposer(VOCABULARY)) as proposer:
        proposer.set_grant(running.grant())
        connected(proposer)
        assert ("by gRPC alone" in caplog.text) == (carrier == "gRPC")
        offer(proposer, sequences, 4)  # their prompts alone
        for one in sequences:
            one.commit(draw.randrange(VOCABULARY))
        for draft_length in (4, 3, 1, 5, 4, 2, 4, 4):
            offer(proposer, sequences, draft_length)
            found = proposed(proposer, sequences, draft_length, running.ahead)
            assert found == beginnings([oracle.proposal(one, draft_length) for one in sequences], found)
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
                found = proposed(proposer, own, 3, running.ahead)
                assert found == beginnings([oracle.proposal(one, 3) for one in own], found)


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
    sequences = [PlayedSequence(number, range(number, number + 60)) for number in range(1, 5)]
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
    sequences = [PlayedSequence(number, range(number, number + 60)) for number in range(1, 5)]
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


def asking(sequences: Sequence[PlayedSequence], told: dict[int, int]) -> draft_pb2.DraftRequest:
    """For three tokens each. `told`: how many tokens of a sequence the draft knows; none: it is opened."""
    request = draft_pb2.DraftRequest()
    for one in sequences:
        tokens, known = one.tokens.tokens, told.get(one.sequence_id, 0)
        if not known:
            sampling = to_wire(worker_pb2.SamplingParameters, one.sampling)
            parameters = worker_pb2.SequenceParameters(prompt_length=len(one.prompt), sampling=sampling)
            parameters.committed_tokens.extend(tokens)
            request.sequences.add(sequence_id=one.sequence_id, parameters=parameters)
            known = len(tokens)
        request.sequence_ids.append(one.sequence_id)
        request.lengths.append(len(tokens))
        request.digests.append(one.digest)
        request.counts.append(len(tokens) - known)
        request.tokens.extend(tokens[known:])
        request.draft_lengths.append(3)
        told[one.sequence_id] = len(tokens)
    request.step_seconds = 1000  # there is time for everything
    return request


def followed(one: PlayedSequence, tokens: Sequence[int]) -> PlayedSequence:
    """The sequence, had these been committed."""
    follower = PlayedSequence(one.sequence_id, one.prompt, one.sampling)
    follower.commit(*one.tokens.tokens[len(one.prompt) :], *tokens)
    return follower


class Likely:
    """What follows the verdicts that a draft with nothing to do computes ahead of: three tokens each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._oracle = Oracle(folder)

    def proposal(self, one: PlayedSequence, count: int = 3) -> list[int]:
        if not self._oracle.has_room:
            self._oracle = Oracle(self._folder)
        return self._oracle.proposal(one, count)

    def alternative(self, one: PlayedSequence, banned: int) -> int:
        """What the draft would choose if it may not choose this one."""
        other = PlayedSequence(one.sequence_id, one.prompt, replace(one.sampling, logit_bias={banned: -100.0}))
        other.commit(*one.tokens.tokens[len(one.prompt) :])
        return self.proposal(other, 1)[0]

    def after(self, one: PlayedSequence, verified: int) -> dict[tuple[int, int], list[int]]:
        """By sequence and digest of the prefix, where so many proposed tokens are verified: for all of them and the
        next one, and for each place that what the draft would have chosen there is right."""
        proposal = self.proposal(one, verified + 1)
        outcomes = [proposal]
        for place in range(verified):
            accepted = proposal[:place]
            outcomes.append([*accepted, self.alternative(followed(one, accepted), proposal[place])])
        likely = [followed(one, outcome) for outcome in outcomes]
        return {(one.sequence_id, each.digest): self.proposal(each) for each in likely}

    def suffix(self, one: PlayedSequence) -> dict[tuple[int, int], list[int]]:
        """Where the proposal came too late, and its first token was right."""
        first, *others = self.proposal(one)
        return {(one.sequence_id, followed(one, [first]).digest): others}


def test_a_draft_with_nothing_to_do_proposes_ahead_of_likely_verdicts(folder: Path) -> None:
    """Of three sequences, one goes on as the draft expects, one as it expects in the second place, and one otherwise;
    a step that has some proposals goes without the others'."""
    likely, told, outgoing = Likely(folder), dict[int, int](), SimpleQueue[draft_pb2.DraftRequest | None]()
    # Short ones, which are read in one batch.
    right, nearly, wrong = sequences = [
        PlayedSequence(number, [number, 7], SAMPLINGS[number % 2]) for number in range(3)
    ]
    for one in sequences:
        one.commit(5)

    with running_draft(lambda: load(folder), ahead=True) as draft, grpc.insecure_channel(draft.address) as channel:
        messages = draft_pb2_grpc.DrafterStub(channel).Propose(iter(outgoing.get, None))

        def ahead(expected: dict[tuple[int, int], list[int]]) -> None:
            """Just this is told, in as many messages as it takes."""
            found: dict[tuple[int, int], list[int]] = {}
            while len(found) < len(expected):
                message = next(messages)
                assert message.ahead
                ends = [*accumulate(message.counts)]
                tokens = [list(message.tokens[end - n : end]) for end, n in zip(ends, message.counts, strict=True)]
                found |= dict(zip(zip(message.sequence_ids, message.digests, strict=True), tokens, strict=True))
            assert found == expected
            assert not message.goes_on

        opening = draft_pb2.DraftOpening(protocol_version=SPOKEN.newest, grant=draft.grant())
        outgoing.put(draft_pb2.DraftRequest(opening=opening))
        outgoing.put(asking(sequences, told))
        answer = next(messages)
        assert (answer.ahead, answer.goes_on) == (False, True)
        assert dict(zip(answer.sequence_ids, zip(*[iter(answer.tokens)] * 3, strict=True), strict=True)) == {
            one.sequence_id: tuple(likely.proposal(one)) for one in sequences
        }
        expected: dict[tuple[int, int], list[int]] = {}
        for one in sequences:
            expected |= likely.after(one, 3) | likely.suffix(one)
        ahead(expected)
        for _ in range(2):
            right.commit(*likely.proposal(right, 4))
            (second, _) = proposal = likely.proposal(nearly, 2)
            nearly.commit(second, likely.alternative(followed(nearly, [second]), proposal[1]))
            wrong.commit(END)
            outgoing.put(asking(sequences, told))
            ahead(likely.after(right, 3) | likely.after(nearly, 3) | likely.after(wrong, 0))
        # Without any guess that was right, the step waits for what it has asked for.
        wrong.commit(END)
        outgoing.put(asking([wrong], told))
        answer = next(messages)
        assert (answer.ahead, list(answer.tokens)) == (False, likely.proposal(wrong))
        ahead(likely.after(wrong, 3) | likely.suffix(wrong))
        # What is not known is said beside what goes on.
        stranger = PlayedSequence(9, [1, 2])
        right.commit(*likely.proposal(right, 4))
        outgoing.put(asking([right, stranger], told | {9: 2}))
        assert list(next(messages).unknown_ids) == [9]
        ahead(likely.after(right, 3))
        outgoing.put(None)
        assert not [*messages]
        wait_until(lambda: draft.draft.pool.free_pages == PAGES, "all pages are free", pause=0.01)


def test_what_was_computed_ahead_for_a_target_that_died_is_freed(folder: Path) -> None:
    """And what is computed for another one is kept."""
    with (
        running_draft(lambda: load(folder), prefix_cache=False, ahead=True) as draft,
        grpc.insecure_channel(draft.address) as channel,
    ):

        def opened(number: int) -> tuple[Any, int]:
            """A target's stream once the draft has nothing to do any more, and the pages that are free then."""
            requests, one = SimpleQueue[draft_pb2.DraftRequest | None](), PlayedSequence(1, range(number, number + 45))
            one.commit(5)
            call = draft_pb2_grpc.DrafterStub(channel).Propose(iter(requests.get, None))
            opening = draft_pb2.DraftOpening(
                protocol_version=SPOKEN.newest, grant=draft.grant(target_id=f"target-{number}")
            )
            requests.put(draft_pb2.DraftRequest(opening=opening))
            requests.put(asking([one], {}))
            for message in call:
                if message.ahead and not message.goes_on:
                    break
            return call, draft.draft.pool.free_pages

        living, before = opened(1)
        dead, after = opened(2)
        # The tokens that are the target's take three pages, and each of four ways on one or two more.
        assert PAGES - before == before - after >= 3 + 4
        dead.cancel()
        wait_until(lambda: draft.draft.pool.free_pages == before, "its pages are free", pause=0.01)
        living.cancel()
        wait_until(lambda: draft.draft.pool.free_pages == PAGES, "all pages are free", pause=0.01)


def test_a_batch_may_outlive_its_server(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    draft, gate = load(folder), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(gate.wait)
        batcher, tokens = Batcher(ModelDrafting(draft, False), draft.pool, thread), DigestedTokens([1, 2])
        opened = Opened(1, SamplingParameters(), b"", [1, 2])

        async def serve() -> None:
            step = VerdictsOfStep((), [Verdict(1, 2, tokens.digest(2), (), 2, opened)], 2)
            batcher.add(TargetStream("target-0", batcher.close), step)

        asyncio.run(serve())
        gate.set()
    assert batcher.running_seconds() is None
    assert batcher.busy_seconds > 0
    assert not caplog.records


@pytest.mark.slow
async def test_a_draft_process_that_is_stopped_is_lost_and_serves_again_when_it_goes_on(folder: Path) -> None:
    settings = {"model": str(folder), "dtype": "float32", "threads": 1, "kv_pages": PAGES}
    oracle, one = Oracle(folder), PlayedSequence(1, [3, 4])
    async with WorkerLauncher([WorkerLaunch(Role.DRAFT, settings)]) as launcher:
        worker = launcher.workers[0]
        with grpc.insecure_channel(worker.address) as channel:
            request = worker_pb2.DescribeRequest(protocol_version=SPOKEN.newest)
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
