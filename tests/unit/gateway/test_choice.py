"""Text, counts and end of one sequence do not depend on the rounds in which its tokens come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.messages import FinishReason, TokenLogprobs
from services.backend.sequence_stream import SequenceFailedError, TokenDelta
from services.gateway.choice import Choice, Piece
from services.gateway.metrics import GatewayMetrics
from services.text.incremental_decoder import IncrementalDecoder
from tests.unit.gateway.test_stop_strings import cut
from tests.unit.services.test_tokenizer import byte_level

TOKENIZER = byte_level()
END = TOKENIZER.token_to_id("<end>")
TEXTS = st.text(alphabet="ab thé漢😀", min_size=1, max_size=20)


class Stream:
    """A stream of the given rounds and end."""

    def __init__(
        self,
        rounds: Sequence[Sequence[int]],
        reason: FinishReason,
        logprobs: bool = False,
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
        cached: int = 0,
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.cancelled = False
        self._rounds = rounds
        self._reason = reason
        self._logprobs = logprobs
        self._prompt = {"prompt_logprobs": prompt_logprobs, "cached": cached}
        self._deltas = self._read()

    async def _read(self) -> AsyncIterator[TokenDelta]:
        for tokens in self._rounds:
            logprobs = tuple(TokenLogprobs(token, -0.5) for token in tokens) if self._logprobs else ()
            yield TokenDelta(tuple(tokens), 4, len(tokens) - 1, (), logprobs, **self._prompt)  # type: ignore[arg-type]
            self._prompt = {}
        self.finish_reason = self._reason

    def cancel(self) -> None:
        self.cancelled = True

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        return await anext(self._deltas)


def read(
    rounds: Sequence[Sequence[int]],
    reason: FinishReason = FinishReason.LENGTH,
    *,
    stop: Sequence[str] = (),
    stop_tokens: Sequence[int] = (END,),
    asked: Sequence[int] = (),
    echo: str = "",
    logprobs: bool = False,
    metrics: GatewayMetrics | None = None,
) -> tuple[Choice, list[Piece], Stream]:
    stream = Stream(rounds, reason, logprobs)
    choice = Choice(
        0,
        stream,
        IncrementalDecoder(TOKENIZER),
        (metrics or GatewayMetrics()).sequence(0.0, 1),
        stop=stop,
        stop_token_ids=frozenset(stop_tokens) | frozenset(asked),
        asked_token_ids=frozenset(asked),
        echo=echo,
    )

    async def run() -> list[Piece]:
        return [piece async for piece in choice.pieces()]

    return choice, asyncio.run(run()), stream


def rounds_of(tokens: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """Splits tokens into rounds of these sizes, repeated as often as needed."""
    rounds, place, number = [], 0, 0
    while place < len(tokens):
        size = sizes[number % len(sizes)]
        rounds.append(tokens[place : place + size])
        place, number = place + size, number + 1
    return rounds


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@given(text=TEXTS, sizes=SIZES)
def test_pieces_make_up_the_text_and_never_show_half_a_character(text: str, sizes: list[int]) -> None:
    tokens = TOKENIZER.encode(text).ids
    choice, pieces, _ = read(rounds_of(tokens, sizes))
    assert "".join(piece.text for piece in pieces) == text
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert [token for piece in pieces for token in piece.tokens] == tokens
    assert choice.completion_tokens == len(tokens)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


@given(text=TEXTS, sizes=SIZES, stops=st.lists(st.text(alphabet="ab thé漢😀", min_size=1, max_size=3), max_size=3))
def test_stop_strings_cut_text_and_count_whatever_the_rounds(text: str, sizes: list[int], stops: list[str]) -> None:
    tokens = TOKENIZER.encode(text).ids
    expected, stop = cut(text, stops)
    choice, pieces, stream = read(rounds_of(tokens, sizes), stop=stops)
    assert "".join(piece.text for piece in pieces) == expected
    count = len(tokens)
    if stop is not None:
        # Up to and including the token that completes the stop string.
        count = next(n for n in range(1, count + 1) if expected + stop in TOKENIZER.decode(tokens[:n]))
    assert choice.completion_tokens == sum(len(piece.tokens) for piece in pieces) == count
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (("stop", stop) if stop else ("length", None))
    assert stream.cancelled == (stop is not None)
    assert choice.accepted <= choice.completion_tokens


def test_characters_of_several_tokens_come_whole() -> None:
    tokens = TOKENIZER.encode("a😀b").ids
    _, pieces, _ = read([[token] for token in tokens])
    assert [piece.text for piece in pieces] == ["a", "😀", "b", ""]
    assert [len(piece.tokens) for piece in pieces] == [1, 4, 1, 0]
    assert [offset for piece in pieces for offset in piece.offsets] == [0, 1, 1, 1, 1, 2]


def test_what_a_round_brings_beyond_the_end_is_not_delivered() -> None:
    tokens = TOKENIZER.encode("ab.cd").ids
    choice, pieces, stream = read([tokens], stop=["."], logprobs=True)
    assert [piece.text for piece in pieces] == ["ab"]
    assert len(pieces[0].tokens) == len(pieces[0].logprobs) == choice.completion_tokens == 3
    assert (choice.drafted, choice.accepted) == (4, 3)
    assert stream.cancelled


def test_stop_tokens_have_no_text_but_count() -> None:
    tokens = TOKENIZER.encode("ab").ids
    choice, pieces, stream = read([[*tokens, END]], FinishReason.STOP)
    assert "".join(piece.text for piece in pieces) == "ab"
    assert choice.completion_tokens == 3
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", None)
    assert not stream.cancelled
    letter = tokens[1]
    _, pieces, _ = read([tokens], FinishReason.STOP, asked=[letter])
    assert "".join(piece.text for piece in pieces) == "a"
    assert pieces[-1].stop_reason == letter


def test_echo_goes_before_and_stops_do_not_look_at_it() -> None:
    tokens = TOKENIZER.encode("bc").ids
    _, pieces, _ = read([tokens], echo="a.", stop=["."], logprobs=True)
    assert [piece.text for piece in pieces] == ["a.", "bc", ""]
    assert pieces[1].offsets == (2, 3)


def test_broken_characters_at_the_end_are_shown_as_such() -> None:
    tokens = TOKENIZER.encode("aé").ids
    _, pieces, _ = read([tokens[:2]])
    assert [piece.text for piece in pieces] == ["a", "\ufffd"]


def test_sequence_that_ends_without_a_reason_to_is_an_error() -> None:
    with pytest.raises(SequenceFailedError, match="ended early"):
        read([], FinishReason.CANCELLED)


def test_what_a_stop_string_cuts_off_is_in_no_metric() -> None:
    metrics = GatewayMetrics()
    choice, pieces, _ = read(rounds_of(TOKENIZER.encode("abcabcabc").ids, [2, 5]), stop=["ca"], metrics=metrics)
    exposition = metrics.exposition().decode().splitlines()
    delivered = sum(len(piece.tokens) for piece in pieces)
    assert 0 < delivered < len(TOKENIZER.encode("abcabcabc").ids)
    for name, count in (
        ("generation_tokens", delivered),
        ("delivered_draft_tokens", choice.drafted),
        ("delivered_accepted_tokens", choice.accepted),
    ):
        assert f"spool_{name}_total {float(count)}" in exposition
    assert choice.completion_tokens == delivered


def test_what_is_said_of_a_prompt_comes_with_the_echo() -> None:
    """In one piece with the first text; the tokens of a request about its prompt alone are not delivered."""
    scores = (TokenLogprobs(7, -1.0), TokenLogprobs(8, -2.0))
    tokens = TOKENIZER.encode("bc").ids
    for only_prompt, texts, count in ((False, ["ab", "c", ""], 2), (True, ["a", ""], 0)):
        stream = Stream([tokens[:1], tokens[1:]], FinishReason.STOP, prompt_logprobs=scores, cached=3)
        meter = GatewayMetrics().sequence(0.0, 2)
        decoder = IncrementalDecoder(TOKENIZER)
        choice = Choice(0, stream, decoder, meter, echo="a", scored=True, only_prompt=only_prompt)

        async def pieces(choice: Choice) -> list[Piece]:
            return [piece async for piece in choice.pieces()]

        found = asyncio.run(pieces(choice))
        assert [piece.text for piece in found] == texts
        assert found[0].prompt_logprobs == scores
        assert not any(piece.prompt_logprobs for piece in found[1:])
        assert sum(len(piece.tokens) for piece in found) == choice.completion_tokens == count
        assert found[-1].finish_reason == ("length" if only_prompt else "stop")
        assert choice.cached == 3
