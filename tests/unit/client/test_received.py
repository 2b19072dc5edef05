"""Repeated calls deliver every part once, however the output is cut into messages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spool.client.received import OutputChangedError, ReceivedOutput
from spool.client.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class Whole:
    """The output of a choice: each token with its text, and characters of text that come before any token."""

    echo: str
    tokens: tuple[tuple[int, str], ...]

    @property
    def ids(self) -> list[int]:
        return [token for token, _ in self.tokens]

    @property
    def text(self) -> str:
        return self.echo + "".join(text for _, text in self.tokens)

    def messages(self, index: int, cuts: set[int], call: str) -> list[pb.GenerateStreamResponse]:
        """Those of one call, divided at these numbers of tokens; text comes one token later than it could."""
        places = sorted({cut for cut in cuts if cut < len(self.tokens)} | {len(self.tokens)})
        parts, begin, said = [], 0, 0
        for place in places:
            last = place == len(self.tokens)
            certain = self.text if last else self.echo + "".join(text for _, text in self.tokens[: max(place - 1, 0)])
            ids = self.ids[begin:place]
            choice = pb.GeneratedChoice(
                index=index,
                text=certain[said:],
                token_ids=ids,
                logprobs=[pb.OutputTokenLogprobs(chosen=pb.Logprob(token_id=token)) for token in ids],
                finish_reason=pb.FINISH_REASON_LENGTH if last else pb.FINISH_REASON_UNSPECIFIED,
                receipt=self.text + "!" if last else "",
            )
            parts.append(pb.GenerateStreamResponse(id=call, model="m", choice=choice))
            begin, said = place, len(certain)
        return parts


USAGE = pb.GenerateStreamResponse(usage=pb.GenerationUsage(completion_tokens=9))
wholes = st.builds(
    Whole,
    st.sampled_from(["", "once "]),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["", "a", "bc", "\u00e9x"])), min_size=1, max_size=12).map(
        tuple
    ),
)


@settings(max_examples=50)
@given(st.lists(wholes, min_size=1, max_size=3), st.data())
def test_every_part_comes_once_however_often_the_stream_breaks(choices: list[Whole], data: st.DataObject) -> None:
    received, taken = ReceivedOutput(), list[pb.GenerateStreamResponse]()
    for call in range(4):
        received.begin_call()
        messages = []
        for index, whole in enumerate(choices):
            cuts = data.draw(st.sets(st.integers(1, len(whole.tokens))))
            messages.append(whole.messages(index, cuts, f"call {call}"))
        # Choices take turns in any order.
        order = data.draw(st.permutations([index for index, parts in enumerate(messages) for _ in parts]))
        mixed = [messages[index].pop(0) for index in order]
        last = call == 3
        arrived = mixed if last else mixed[: data.draw(st.integers(0, len(mixed)))]
        taken += [part for message in arrived if (part := received.take(message)) is not None]
    assert received.take(USAGE) == USAGE
    received.end_call()
    for index, whole in enumerate(choices):
        parts = [part.choice for part in taken if part.choice.index == index]
        assert [token for part in parts for token in part.token_ids] == whole.ids
        assert [entry.chosen.token_id for part in parts for entry in part.logprobs] == whole.ids
        assert "".join(part.text for part in parts) == whole.text
        assert [part.finish_reason for part in parts].count(pb.FINISH_REASON_LENGTH) == 1
        assert parts[-1].finish_reason == pb.FINISH_REASON_LENGTH
        assert [part.receipt for part in parts if part.receipt] == [whole.text + "!"]
        assert all(part.text or part.token_ids or part.finish_reason for part in parts)
    assert len({part.id for part in taken}) == 1


def part(text: str, *tokens: int, end: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(choice=pb.GeneratedChoice(text=text, token_ids=tokens, finish_reason=end))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([part("ab", 1, 2)], [part("ab", 1, 3)], "tokens at 0 that differ"),
        ([part("a", 1), part("b", 2)], [part("a", 1), part("c", 2)], "text at 1 that differ"),
        ([part("ab", 1, 2)], [part("a", 1, end=pb.FINISH_REASON_STOP)], "an end at 1 that differ"),
        ([part("a", 1, end=pb.FINISH_REASON_STOP)], [part("ab", 1, 2)], "another end at 1"),
        ([part("a", 1, end=pb.FINISH_REASON_STOP)], [part("a", 1, end=pb.FINISH_REASON_LENGTH)], "another end at 1"),
        ([part("ab", 1, 2)], [part("a", 1), USAGE], "choice 0 ended before"),
    ],
)
def test_other_output_is_found(
    before: list[pb.GenerateStreamResponse], after: list[pb.GenerateStreamResponse], message: str
) -> None:
    received = ReceivedOutput()
    received.begin_call()
    for one in before:
        assert received.take(one) is not None
    received.begin_call()
    *same, other = after
    for one in same:
        assert received.take(one) is None
    with pytest.raises(OutputChangedError, match=message):
        received.take(other)
