"""Text, counts and end of one sequence do not depend on the rounds in which its tokens come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spool.scheduler.messages import EmitTokens, FinishReason, TokenLogprobs
from spool.services.backend.interface import GenerationRequest
from spool.services.backend.sequence_stream import SequenceFailedError
from spool.services.gateway.answers.reasoning import Reasoning
from spool.services.gateway.choice import Choice, Piece
from spool.services.gateway.metrics import GatewayMetrics
from spool.services.gateway.options import GenerationOptions
from spool.services.text.incremental_decoder import IncrementalDecoder
from tests.unit.gateway.test_stop_strings import cut
from tests.unit.services.test_tokenizer import byte_level

TOKENIZER = byte_level()
END = TOKENIZER.token_to_id("<end>")
TEXTS = st.text(alphabet="ab thé漢😀", min_size=1, max_size=20)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)
STOPS = st.lists(st.text(alphabet="ab thé漢😀", min_size=1, max_size=3), max_size=3)


class Stream:
    """The given rounds of tokens, each after a draft of four, and then the end."""

    def __init__(self, rounds: Sequence[Sequence[int]], reason: FinishReason) -> None:
        self.finish_reason: FinishReason | None = None
        self.cancelled = False
        self._reason = reason
        self._deltas = self._read(rounds)

    async def _read(self, rounds: Sequence[Sequence[int]]) -> AsyncIterator[EmitTokens]:
        for tokens in rounds:
            logprobs = tuple(TokenLogprobs(token, -0.5) for token in tokens)
            yield EmitTokens(1, tuple(tokens), 4, len(tokens) - 1, (), logprobs)
        self.finish_reason = self._reason

    def cancel(self) -> None:
        self.cancelled = True

    def __aiter__(self) -> AsyncIterator[EmitTokens]:
        return self

    async def __anext__(self) -> EmitTokens:
        return await anext(self._deltas)


def read(
    rounds: Sequence[Sequence[int]],
    reason: FinishReason = FinishReason.LENGTH,
    stop: Sequence[str] = (),
    asked: frozenset[int] = frozenset(),
    reasoning: Reasoning = Reasoning.NONE,
) -> tuple[Choice, list[Piece], Stream]:
    stream, meter = Stream(rounds, reason), GatewayMetrics().sequence(0.0, 1)
    decoder = IncrementalDecoder(TOKENIZER)
    options = GenerationOptions(stop=tuple(stop), stop_token_ids=tuple(asked))
    request = GenerationRequest((), 1, asked | {END})
    choice = Choice(0, request, stream, decoder, meter, options, reasoning=reasoning)

    async def run() -> list[Piece]:
        return [piece async for piece in choice.pieces()]

    return choice, asyncio.run(run()), stream


def rounds_of(tokens: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """The tokens in rounds of these sizes, repeated as often as needed."""
    rounds: list[Sequence[int]] = []
    while tokens:
        size = sizes[len(rounds) % len(sizes)]
        rounds.append(tokens[:size])
        tokens = tokens[size:]
    return rounds


@given(text=TEXTS, sizes=SIZES, stops=STOPS)
def test_stop_strings_cut_text_and_count_whatever_the_rounds(text: str, sizes: list[int], stops: list[str]) -> None:
    tokens = TOKENIZER.encode(text).ids
    expected, stop = cut(text, stops)
    choice, pieces, stream = read(rounds_of(tokens, sizes), stop=stops)
    assert "".join(piece.text for piece in pieces) == expected
    assert not any("\ufffd" in piece.text for piece in pieces)
    count = len(tokens)
    if stop is not None:
        # Up to and including the token that completes the stop string.
        count = next(n for n in range(1, count + 1) if expected + stop in TOKENIZER.decode(tokens[:n]))
    assert [token for piece in pieces for token in piece.tokens] == tokens[:count]
    assert choice.completion_tokens == sum(len(piece.logprobs) for piece in pieces) == count
    end = ("stop", stop) if stop else ("length", None)
    assert [(piece.finish_reason, piece.stop_reason) for piece in pieces] == [(None, None)] * (len(pieces) - 1) + [end]
    assert stream.cancelled == (stop is not None)


@given(text=TEXTS, sizes=SIZES, stops=STOPS, opened=st.booleans(), ended=st.booleans())
def test_stop_strings_do_not_end_reasoning(
    text: str, sizes: list[int], stops: list[str], opened: bool, ended: bool
) -> None:
    thought = f"{'' if opened else ' <think>'}{text}</{'think>' if ended else 'th'}"
    rounds = rounds_of(TOKENIZER.encode(thought + text).ids, sizes)
    choice, pieces, _ = read(rounds, stop=stops, reasoning=Reasoning.OPEN if opened else Reasoning.POSSIBLE)
    expected, stop = cut(text, stops) if ended else (text, None)
    assert "".join(piece.text for piece in pieces) == thought + expected
    assert (choice.finish_reason, pieces[-1].stop_reason) == (("stop", stop) if stop else ("length", None))


@pytest.mark.parametrize("text", ["<thank", "<thi", " <t", "a<think>b", "<"])
def test_stop_strings_end_answers_without_reasoning(text: str) -> None:
    for stop in ("<t", "<"):
        _, pieces, _ = read(
            [[token] for token in TOKENIZER.encode(text).ids], stop=[stop], reasoning=Reasoning.POSSIBLE
        )
        expected, hit = cut(text, [stop])
        assert ("".join(piece.text for piece in pieces), pieces[-1].stop_reason) == (expected, hit)


def test_a_token_comes_with_the_first_text_that_is_certain_after_it() -> None:
    _, pieces, _ = read([[token] for token in TOKENIZER.encode("a😀b").ids])
    assert [piece.text for piece in pieces] == ["a", "😀", "b", ""]
    assert [len(piece.tokens) for piece in pieces] == [1, 4, 1, 0]
    assert [offset for piece in pieces for offset in piece.offsets] == [0, 1, 1, 1, 1, 2]


def test_a_sequence_that_ends_without_a_reason_is_an_error() -> None:
    with pytest.raises(SequenceFailedError, match="ended early"):
        read([], FinishReason.CANCELLED)
