"""What a draft would bring, round by round, from one pass over text the target wrote. Knows no torch.

Drafting and decoding are greedy, so a draft proposes the same token at a position whatever came of the rounds before:
the one that follows the target's own text up to there. A round accepts as many tokens as match without a gap, so the
rounds follow exactly from which positions match (teacher forcing); nothing needs to be run token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.drafting.prompt_lookup import TokenPlaces
from engine.settings import LONGEST_LOOKUP_MATCH


@dataclass(slots=True)
class RoundCount:
    """`tokens` committed in `rounds`; the first token of an answer, which the prefill brings, counts nowhere."""

    rounds: int = 0
    tokens: int = 0

    def add(self, other: RoundCount) -> None:
        self.rounds += other.rounds
        self.tokens += other.tokens

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0


def count_rounds(length: int, accepted_at: Callable[[int], int]) -> RoundCount:
    """Rounds over an answer of `length` tokens; `accepted_at(i)` draft tokens survive in one that begins at i."""
    count = RoundCount()
    position = 1
    while position < length:
        committed = min(accepted_at(position) + 1, length - position)
        count.add(RoundCount(1, committed))
        position += committed
    return count


def drafted(matches: Sequence[bool], draft_length: int) -> Callable[[int], int]:
    """Of a draft that proposes `draft_length` tokens; `matches[i]` says whether it proposes the answer's token i."""
    accepted = [0] * (len(matches) + 1)
    for index in range(len(matches) - 1, -1, -1):
        accepted[index] = accepted[index + 1] + 1 if matches[index] else 0
    return lambda position: min(accepted[position], draft_length)


def looked_up(
    prompt: Sequence[int], answer: Sequence[int], draft_length: int, match: int, otherwise: Callable[[int], int]
) -> Callable[[int], int]:
    """Of prompt lookup: where the last `match` tokens stood before, what followed them is proposed, else `otherwise`.

    As `engine.drafting.model_draft` combines the two. Positions must be asked for in ascending order.
    """
    places = TokenPlaces()
    history = [*prompt, *answer]

    def accepted_at(position: int) -> int:
        places.follow(history[: len(prompt) + position])
        proposal = places.continuation(draft_length, match, LONGEST_LOOKUP_MATCH)
        if not proposal:
            return otherwise(position)
        count = 0
        for proposed, written in zip(proposal, answer[position:], strict=False):
            if proposed != written:
                break
            count += 1
        return count

    return accepted_at


def proposes_nothing(position: int) -> int:
    return 0
