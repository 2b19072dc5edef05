"""What the rounds of a pass over some jobs committed, by category."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.offline.decoding import Job
from services.backend.sequence_stream import TokenDelta

NO_CATEGORY = "-"


@dataclass(slots=True)
class _Sequence:
    deliveries: int = 0
    first: float = 0.0
    last: float = 0.0
    first_tokens: int = 0
    tokens: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        """After the first delivery; None where all came at once."""
        seconds = self.last - self.first
        return (self.tokens - self.first_tokens) / seconds if seconds > 0 else None


@dataclass(slots=True)
class CategoryRounds:
    """Sums over the sequences of one category.

    A round is one verification of one sequence. `drafted_at[i]` counts rounds with a draft token at place i,
    `accepted_at[i]` those whose draft survived up to and with that place: their quotient is the agreement.
    """

    sequences: int = 0
    tokens: int = 0
    rounds: int = 0
    round_tokens: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)

    def add_round(self, drafted: int, accepted: int, tokens: int) -> None:
        self.rounds += 1
        self.round_tokens += tokens
        while len(self.drafted_at) < drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for place in range(drafted):
            self.drafted_at[place] += 1
            self.accepted_at[place] += place < accepted

    def to_json(self) -> dict[str, Any]:
        """`sequence_tokens_per_second` is the median over sequences, each from its first delivery to its last."""
        return {
            "sequences": self.sequences,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "committed_per_round": self.round_tokens / self.rounds if self.rounds else None,
            "drafted_at": self.drafted_at,
            "accepted_at": self.accepted_at,
            "sequence_tokens_per_second": statistics.median(self.speeds) if self.speeds else None,
        }


class RoundLog:
    """Listens to the deliveries of one pass; `clock` is a monotonic clock in seconds."""

    def __init__(self, jobs: Sequence[Job], clock: Callable[[], float]) -> None:
        self._jobs = jobs
        self._clock = clock
        self._sequences = [_Sequence() for _ in jobs]
        self._categories: defaultdict[str, CategoryRounds] = defaultdict(CategoryRounds)

    def add(self, index: int, delta: TokenDelta) -> None:
        sequence = self._sequences[index]
        sequence.last = self._clock()
        sequence.tokens += len(delta.tokens)
        if sequence.deliveries == 0:
            # It comes out of the prefill and is no round.
            sequence.first, sequence.first_tokens = sequence.last, len(delta.tokens)
        else:
            self._category(index).add_round(delta.drafted, delta.accepted, len(delta.tokens))
        sequence.deliveries += 1

    def by_category(self) -> dict[str, CategoryRounds]:
        """To be asked once, at the end."""
        for index, sequence in enumerate(self._sequences):
            category = self._category(index)
            category.sequences += 1
            category.tokens += sequence.tokens
            if (speed := sequence.tokens_per_second) is not None:
                category.speeds.append(speed)
        return dict(sorted(self._categories.items()))

    def _category(self, index: int) -> CategoryRounds:
        return self._categories[self._jobs[index].prompt.category or NO_CATEGORY]
