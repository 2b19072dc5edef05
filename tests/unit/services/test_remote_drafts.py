"""A target whose draft worker answers late, wrongly or not at all: nothing wrong is taken, and nothing stands still."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from spool.protos import draft_pb2
from spool.services.rpc.protocol_version import SPOKEN
from spool.services.worker.drafting.remote import RemoteProposer
from spool.services.worker.drafting.stream import StreamOptions
from tests.support.draft_servers import Answered, PlayedSequence, ScriptedDrafter, answer_of, offer, take
from tests.support.extreme_values import extreme_messages
from tests.support.waiting import LONG, setting, wait_until

VOCABULARY = 50
OPTIONS = StreamOptions(first_backoff=0.01, longest_backoff=0.05)
FOREVER = 100 * LONG
"""A wait that would end the test run."""


def healthy(request: draft_pb2.DraftRequest) -> Answered:
    yield answer_of(request)


@contextmanager
def connected(drafter: ScriptedDrafter, options: StreamOptions = OPTIONS) -> Iterator[RemoteProposer]:
    with closing(RemoteProposer(VOCABULARY, options=options)) as proposer:
        proposer.set_grant(drafter.grant())
        wait_until(lambda: proposer.connected, "the stream is there", pause=0.01)
        assert drafter.requests.get(timeout=LONG).opening.protocol_version == SPOKEN.newest
        yield proposer


def played(*sequence_ids: int) -> list[PlayedSequence]:
    sequences = [PlayedSequence(sequence_id, [1, 2, 3]) for sequence_id in sequence_ids]
    for one in sequences:
        one.commit(4)
    return sequences


def proposed(proposer: RemoteProposer, sequences: Sequence[PlayedSequence]) -> list[list[int]]:
    wait_until(lambda: all(take(proposer, sequences, 9)), "there are proposals", pause=0.01)
    return take(proposer, sequences, 9)


def proposed_again(proposer: RemoteProposer, sequences: Sequence[PlayedSequence]) -> list[list[int]]:
    """Where streams may break yet, so that an offer may be lost."""

    def are_there() -> bool:
        found = all(take(proposer, sequences, 9))
        if not found:
            offer(proposer, sequences, 2)
        return found

    wait_until(are_there, "there are proposals", pause=0.02)
    return take(proposer, sequences, 9)


def refused(proposer: RemoteProposer, sequence_id: int) -> None:
    wait_until(lambda: sequence_id in proposer.report().refused, "it is refused", pause=0.01)  # type: ignore[union-attr]


def test_only_new_tokens_travel_and_sequences_that_are_unknown_are_opened_again() -> None:
    (one,) = played(7)
    answers = [healthy, healthy, lambda request: iter([draft_pb2.Proposals(unknown_ids=[7])]), healthy, healthy]

    def script(request: draft_pb2.DraftRequest) -> Answered:
        return iter(()) if request.HasField("opening") else answers.pop(0)(request)

    with ScriptedDrafter(script) as drafter, connected(drafter) as proposer:

        def round_of(*tokens: int) -> draft_pb2.DraftRequest:
            one.commit(*tokens)
            offer(proposer, [one], 2)
            request = drafter.requests.get(timeout=LONG)
            assert (list(request.lengths), list(request.digests)) == ([len(one.tokens)], [one.digest])
            return request

        opened = round_of(5)
        assert [sequence.sequence_id for sequence in opened.sequences] == [7]
        assert list(opened.sequences[0].parameters.committed_tokens) == one.tokens.tokens
        assert not opened.tokens
        assert proposed(proposer, [one]) == [[1, 1]]
        assert take(proposer, [one], 1) == [[1]]
        known = round_of(1, 1, 6)
        assert not known.sequences
        assert list(known.tokens) == [1, 1, 6]
        assert take(proposer, [one], 2, FOREVER) == [[1, 1]]
        round_of(8)
        assert take(proposer, [one], 2, FOREVER) == [[]]
        assert [sequence.sequence_id for sequence in round_of(9).sequences] == [7]
        assert proposed(proposer, [one]) == [[1, 1]]
        # Nothing is asked for a sequence that ended; the draft hears of its end.
        (other,) = played(8)
        proposer.forget(one.drafting)
        offer(proposer, [other], 1)
        assert list(drafter.requests.get(timeout=LONG).closed_ids) == [7]


def test_refused_sequences_are_asked_for_no_more() -> None:
    def script(request: draft_pb2.DraftRequest) -> Answered:
        answer = answer_of(request, lambda sequence_id, most: () if sequence_id == 1 else (1,) * most)
        answer.refused_ids.extend({1} & {*request.sequence_ids})
        yield answer

    sequences = played(1, 2)
    with ScriptedDrafter(script) as drafter, connected(drafter) as proposer:
        offer(proposer, sequences, 2)
        assert list(drafter.requests.get(timeout=LONG).sequence_ids) == [1, 2]
        refused(proposer, 1)
        for one in sequences:
            one.commit(5)
        offer(proposer, sequences, 2)
        assert list(drafter.requests.get(timeout=LONG).sequence_ids) == [2]
        assert take(proposer, sequences, 2, FOREVER) == [[], [1, 1]]


def dying_of_one(request: draft_pb2.DraftRequest) -> Answered:
    if 1 in request.sequence_ids:
        raise RuntimeError("the draft dies")
    yield answer_of(request)


def silent_on_one(request: draft_pb2.DraftRequest) -> Answered:
    if 1 not in request.sequence_ids:
        yield answer_of(request)


def offer_over_break(proposer: RemoteProposer, one: PlayedSequence) -> None:
    """Over a stream that breaks of it."""
    wait_until(lambda: proposer.connected, "the stream is there again", pause=0.01)
    offer(proposer, [one], 2)
    wait_until(lambda: not proposer.connected, "the stream is lost", pause=0.001)


def owe(proposer: RemoteProposer, drafter: ScriptedDrafter, one: PlayedSequence) -> None:
    """Asks a draft that does not answer for the sequence, over a stream that stays."""
    wait_until(lambda: proposer.connected, "the stream is there", pause=0.01)
    offer(proposer, [one], 2)
    wait_until(lambda: drafter.requests.get(timeout=LONG).sequence_ids, "it is asked for", pause=0)


@pytest.mark.parametrize("reading", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
def test_sequences_for_which_two_drafts_owed_an_answer_are_refused(reading: bool, breaks: bool) -> None:
    """Whether they died before the target left them or may die later, as they propose or as they read the prompt."""
    deadly, other = played(1, 2)
    if reading:
        deadly = PlayedSequence(1, [1, 2, 3])
    with ScriptedDrafter(dying_of_one if breaks else silent_on_one) as drafter, connected(drafter) as proposer:
        for number in (2, 3):
            if breaks:
                offer_over_break(proposer, deadly)
            else:
                owe(proposer, drafter, deadly)
            proposer.set_grant(drafter.grant(number))
        refused(proposer, 1)
        wait_until(lambda: proposer.connected, "the stream is there again", pause=0.01)
        offer(proposer, [deadly, other], 2)
        assert proposed(proposer, [other]) == [[1, 1]]


def test_links_that_break_refuse_nothing() -> None:
    (one,) = played(1)
    with ScriptedDrafter(dying_of_one) as drafter, connected(drafter) as proposer:
        for _ in range(4):
            offer_over_break(proposer, one)
        # One draft that owes is no two.
        proposer.set_grant(drafter.grant(2))
        drafter.script = healthy
        assert proposed_again(proposer, [one]) == [[1, 1]]
        assert proposer.report().refused == ()  # type: ignore[union-attr]


def test_a_draft_that_has_let_the_stream_in_again_owes_nothing_of_before() -> None:
    (one,) = played(1)
    with ScriptedDrafter(dying_of_one) as drafter, connected(drafter) as proposer:
        for number in (2, 3, 4):
            offer_over_break(proposer, one)
            wait_until(lambda: proposer.connected, "the stream is there again", pause=0.01)
            proposer.set_grant(drafter.grant(number))
            wait_until(lambda: proposer.connected, "the other draft lets the target in", pause=0.01)
        assert proposer.report().refused == ()  # type: ignore[union-attr]


def test_a_proposal_between_two_drafts_that_owe_clears_a_sequence() -> None:
    (deadly,) = played(1)
    with ScriptedDrafter(healthy) as drafter, connected(drafter) as proposer:
        for number in (2, 3, 4):
            wait_until(lambda: proposer.connected, "the stream is there again", pause=0.01)
            drafter.script = healthy
            offer(proposer, [deadly], 2)
            assert proposed(proposer, [deadly]) == [[1, 1]]
            drafter.script = dying_of_one
            deadly.commit(5)
            offer_over_break(proposer, deadly)
            proposer.set_grant(drafter.grant(number))
        report = proposer.report()
        assert report is not None
        assert report.refused == ()


def test_drafts_that_are_late_refuse_nothing() -> None:
    slow, other = played(1, 2)

    def late(request: draft_pb2.DraftRequest) -> Answered:
        answer = answer_of(request)
        if 1 in request.sequence_ids:
            answer.digests[0] ^= 1
        yield answer

    with ScriptedDrafter(late) as drafter, connected(drafter) as proposer:
        for number in (2, 3, 4):
            wait_until(lambda: proposer.connected, "the stream is there", pause=0.01)
            for one in (slow, other):
                offer(proposer, [one], 2)
            assert proposed(proposer, [other]) == [[1, 1]]
            proposer.set_grant(drafter.grant(number))
        report = proposer.report()
        assert report is not None
        assert report.refused == ()


def goes_on(request: draft_pb2.DraftRequest) -> draft_pb2.Proposals:
    answer = answer_of(request)
    answer.goes_on = True
    return answer


def ahead_of(one: PlayedSequence, *tokens: int) -> draft_pb2.Proposals:
    """Three tokens, behind those of the sequence and these."""
    digest = one.tokens.digest_with(tokens)
    return draft_pb2.Proposals(
        sequence_ids=[one.sequence_id], digests=[digest], counts=[3], tokens=[7, 8, 9], ahead=True
    )


@pytest.mark.parametrize("right", [True, False])
def test_what_was_proposed_ahead_is_there_with_the_verdict_if_that_was_guessed(right: bool) -> None:
    """The draft itself answers the first request only."""
    one, other = played(1, 2)

    def script(request: draft_pb2.DraftRequest) -> Answered:
        if request.sequences:
            yield goes_on(request)
            if one.sequence_id in request.sequence_ids:
                yield ahead_of(one, 1, 1, 5)

    with ScriptedDrafter(script) as drafter, connected(drafter) as proposer:
        for each in (one, other):  # once the other has an answer, all of the first one's has come
            offer(proposer, [each], 2)
            assert proposed(proposer, [each]) == [[1, 1]]
        one.commit(1, 1, 5 if right else 6)
        offer(proposer, [one], 2)
        assert take(proposer, [one], 2) == ([[7, 8]] if right else [[]])
        request = [drafter.requests.get(timeout=LONG) for _ in range(3)][-1]
        assert list(request.tokens) == one.tokens.tokens[-3:]
        assert list(request.draft_lengths) == [2]


def test_the_latest_guesses_are_kept() -> None:
    """Sixteen of a sequence, whatever the draft sends."""
    one, other = played(1, 2)

    def script(request: draft_pb2.DraftRequest) -> Answered:
        if request.sequences:
            yield goes_on(request)
        if one.sequence_id in request.sequence_ids and request.sequences:
            yield from (ahead_of(one, 1, 1, token) for token in range(40))

    for token, kept in ((23, False), (24, True), (39, True)):
        one, other = played(1, 2)
        with ScriptedDrafter(script) as drafter, connected(drafter) as proposer:
            for each in (one, other):
                offer(proposer, [each], 2)
                assert proposed(proposer, [each]) == [[1, 1]]
            one.commit(1, 1, token)
            offer(proposer, [one], 2)
            assert take(proposer, [one], 2) == ([[7, 8]] if kept else [[]])


def test_a_step_with_a_proposal_does_not_wait_for_others() -> None:
    """The draft answers for the second sequence once only."""
    sequences = played(1, 2)

    def script(request: draft_pb2.DraftRequest) -> Answered:
        answer = answer_of(request)
        if not request.sequences:
            for column in (answer.sequence_ids, answer.digests, answer.counts, answer.tokens):
                del column[len(column) // 2 :]
        yield answer

    with ScriptedDrafter(script) as drafter, connected(drafter) as proposer:
        offer(proposer, sequences, 2)
        assert proposed(proposer, sequences) == [[1, 1], [1, 1]]
        proposer.report()
        for one in sequences:
            one.commit(5)
        offer(proposer, sequences, 2)
        assert take(proposer, sequences, 2, FOREVER) == [[1, 1], []]
        report = proposer.report()
        assert report is not None
        assert (report.asked, report.in_time) == (2, 1)


@pytest.mark.parametrize("survives", [False, True])
def test_sequences_over_which_two_drafts_died_ahead_are_refused(survives: bool) -> None:
    """A draft that answers twice has not died of what it computed in between."""
    (deadly,) = played(1)

    def script(request: draft_pb2.DraftRequest) -> Answered:
        if deadly.sequence_id in request.sequence_ids:
            yield goes_on(request)
            if not survives or not request.sequences:
                raise RuntimeError("the draft dies")

    with ScriptedDrafter(script) as drafter, connected(drafter) as proposer:
        for number in (2, 3):
            wait_until(lambda: proposer.connected, "the stream is there", pause=0.01)
            if survives:
                offer(proposer, [deadly], 2)
                assert proposed(proposer, [deadly]) == [[1, 1]]
                deadly.commit(5)
            offer_over_break(proposer, deadly)
            proposer.set_grant(drafter.grant(number))
        report = proposer.report()
        assert report is not None
        assert report.refused == (() if survives else (1,))


WRONG = {
    "token": ({"tokens": [1, VOCABULARY]}, f"tokens holds {VOCABULARY}, must be below vocabulary_size {VOCABULARY}"),
    "count": ({"tokens": [1, 1, 1], "counts": [3]}, "tokens for sequence 1 is 3, must be at most 2"),
    "counts": ({"counts": [1]}, "tokens has 2 entries, must have 1"),
    "digests": ({"digests": []}, "digests has 0 entries, must have 1"),
    "ids": ({"sequence_ids": [1, 2]}, "digests has 1 entries, must have 2"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_answers_break_the_stream(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    changes, said = WRONG[kind]
    (one,) = played(1)

    def script(request: draft_pb2.DraftRequest) -> Answered:
        answer = answer_of(request)
        for name, value in changes.items():
            answer.ClearField(name)
            getattr(answer, name).extend(value)
        if request.sequence_ids:
            yield answer

    with ScriptedDrafter(script) as drafter, connected(drafter) as proposer:
        offer(proposer, [one], 2)
        wait_until(lambda: said in caplog.text, "the message is named", pause=0.01)
        assert drafter.address in caplog.text
        assert take(proposer, [one], 2) == [[]]
        drafter.script = healthy
        assert proposed_again(proposer, [one]) == [[1, 1]]


def test_no_answer_hurts_a_target() -> None:
    """Extreme values, columns at random, and bytes at random. What is taken is a proposal all the same."""
    draw = random.Random(3)
    sequences = played(1, 2)

    def wrong(request: draft_pb2.DraftRequest) -> draft_pb2.Proposals | bytes:
        answer = answer_of(request)
        answer.unknown_ids.extend(draw.sample([3, 4], draw.randint(0, 2)))
        match draw.randrange(3):
            case 0:
                (extreme,) = extreme_messages(answer, draw.randrange(1000), 1)
                assert isinstance(extreme, draft_pb2.Proposals)
                return extreme
            case 1:
                for name in draw.sample(["sequence_ids", "counts", "tokens", "digests"], 2):
                    answer.ClearField(name)
                    getattr(answer, name).extend(draw.choices((0, 1, 2, 3, 49, 50, 2**32 - 1), k=draw.randint(0, 4)))
                return answer
            case _:
                return draw.randbytes(draw.randint(1, 60))

    def script(request: draft_pb2.DraftRequest) -> Answered:
        if request.sequence_ids:
            yield wrong(request)
            yield answer_of(request)

    with ScriptedDrafter(script) as drafter, connected(drafter) as proposer:
        for _ in range(150):
            wait_until(lambda: proposer.connected, "the stream is there", pause=0.001)
            for one in sequences:
                one.commit(draw.randrange(VOCABULARY))
            offer(proposer, sequences, 2)
            for proposal in take(proposer, sequences, 2, 0.01):
                assert len(proposal) <= 2
                assert all(0 <= token < VOCABULARY for token in proposal)
        drafter.script = healthy
        assert proposed_again(proposer, played(11, 12)) == [[1, 1]] * 2


def asked_in(proposer: RemoteProposer, drafter: ScriptedDrafter, one: PlayedSequence, wait_seconds: float) -> int:
    """Plays a step, and returns how many tokens the draft was asked for before it."""
    one.commit(5)
    offer(proposer, [one], 2)
    (asked,) = drafter.requests.get(timeout=LONG).draft_lengths
    take(proposer, [one], 2, wait_seconds)
    report = proposer.report()
    assert report is not None
    # Where it is asked for KV alone, it cannot be late.
    assert report.asked == (asked > 0)
    assert report.connected
    return asked


def test_a_draft_that_stays_late_is_asked_for_kv_alone_for_up_to_a_hundred_steps() -> None:
    """A step that must not wait would end the test run if it did."""
    late = [False]
    (one,) = played(1)

    def script(request: draft_pb2.DraftRequest) -> Answered:
        return iter(()) if late[0] else healthy(request)

    with ScriptedDrafter(script) as drafter, connected(drafter) as proposer:

        def asked_for(steps: int, wait_seconds: float) -> list[int]:
            """How many tokens, for the proposal of each step."""
            return [asked_in(proposer, drafter, one, wait_seconds) for _ in range(steps)]

        offer(proposer, [one], 2)
        assert drafter.requests.get(timeout=LONG).draft_lengths == [2]
        # Nobody waits for the first answer for a sequence.
        take(proposer, [one], 2, FOREVER)
        assert proposed(proposer, [one]) == [[1, 1]]
        proposer.report()
        late[0] = True
        assert asked_for(3, 0.01) == [2, 2, 2]
        for pause in (1, 3, 7, 15, 31, 63, 99):
            assert asked_for(pause, FOREVER) == [0] * pause
            assert asked_for(1, 0.01) == [2]
        assert asked_for(99, FOREVER) == [0] * 99
        late[0] = False
        assert asked_for(3, FOREVER) == [2, 2, 2]
        late[0] = True
        assert asked_for(4, 0.01) == [2, 2, 2, 0]


def test_nothing_waits_for_a_sequence_that_the_draft_has_to_catch_up_with() -> None:
    waiting = threading.Event()
    (one,) = played(1)

    def script(request: draft_pb2.DraftRequest) -> Answered:
        if len(one.tokens) > 99:
            waiting.wait()
        yield answer_of(request)

    with ScriptedDrafter(script) as drafter, connected(drafter) as proposer, setting(waiting):
        offer(proposer, [one], 2)
        assert proposed(proposer, [one]) == [[1, 1]]
        one.commit(*[5] * 100)
        offer(proposer, [one], 2)
        assert take(proposer, [one], 2, FOREVER) == [[]]
        waiting.set()
        assert proposed(proposer, [one]) == [[1, 1]]


def test_answers_that_a_lost_draft_owes_are_not_in_time() -> None:
    waiting = threading.Event()
    (one,) = played(1)

    def script(request: draft_pb2.DraftRequest) -> Answered:
        if len(one.tokens) > 4:
            waiting.wait()
            raise RuntimeError("the draft dies")
        yield answer_of(request)

    with ScriptedDrafter(script) as drafter, connected(drafter) as proposer, setting(waiting):
        offer(proposer, [one], 2)
        assert proposed(proposer, [one]) == [[1, 1]]
        proposer.report()
        one.commit(5)
        offer(proposer, [one], 2)
        death = threading.Timer(0.1, waiting.set)
        death.start()
        assert take(proposer, [one], 2, FOREVER) == [[]]
        report = proposer.report()
        assert report is not None
        assert report.in_time == 0


def test_a_draft_that_reads_nothing_is_dropped_and_decoding_goes_on_plainly() -> None:
    hung = threading.Event()

    def script(request: draft_pb2.DraftRequest) -> Answered:
        if request.sequence_ids:
            hung.wait()
        yield answer_of(request)

    def long_sequence(sequence_id: int) -> PlayedSequence:
        one = PlayedSequence(sequence_id, [1] * 100_000)
        one.commit(1)
        return one

    options = replace(OPTIONS, queued_requests=2)
    with ScriptedDrafter(script) as drafter, connected(drafter, options) as proposer, setting(hung):
        offered: list[PlayedSequence] = []
        while proposer.connected:
            offered.append(long_sequence(len(offered)))
            offer(proposer, offered[-1:], 2)
            assert take(proposer, offered[-1:], 2, FOREVER) == [[]]
        assert take(proposer, offered, 2, FOREVER) == [[]] * len(offered)
        hung.set()
        assert proposed_again(proposer, [long_sequence(len(offered))]) == [[1, 1]]
