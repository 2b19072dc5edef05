"""Whether a target takes a draft's token, and which of the draft's choices it takes instead: fixed by place.

So all policies, and workers in virtual and in real time, meet the same luck.
"""

from __future__ import annotations

from collections.abc import Callable

AcceptanceOf = Callable[[int, int], float]
"""The chance of a draft token by sequence id and position."""


def evenly(sequence_id: int, position: int) -> float:
    """A number from 0 to 1 for each place, evenly distributed."""
    value = (sequence_id * 1_000_003 + position + 1) * 0x9E3779B97F4A7C15 % 2**64
    value = (value ^ (value >> 29)) * 0xBF58476D1CE4E5B9 % 2**64
    return (value >> 20) % 10_000 / 10_000


class Luck:
    """`ranks`: of the tokens that are not the draft's first choice, the shares that are its second, its third, and so
    on."""

    def __init__(self, acceptance: AcceptanceOf, ranks: tuple[float, ...] = ()) -> None:
        self.acceptance = acceptance
        self.ranks = ranks

    def is_first(self, sequence_id: int, position: int) -> bool:
        """Whether the target takes the draft's first choice."""
        return evenly(sequence_id, position) < self.acceptance(sequence_id, position)

    def rank(self, sequence_id: int, position: int) -> int:
        """Which of the draft's choices the target takes, from 1 on; 0 for none that `ranks` knows."""
        if self.is_first(sequence_id, position):
            return 1
        chance = evenly(-1 - sequence_id, position)
        for rank, share in enumerate(self.ranks, 2):
            chance -= share
            if chance < 0:
                return rank
        return 0

    def likeliest(self, sequence_id: int, first: int, drafted: int, count: int) -> list[tuple[int, int, bool]]:
        """Of the outcomes of a verification of `drafted` tokens from position `first` on, `count` that are likeliest by
        these shares: accepted tokens, which of the draft's choices comes then, and whether the target takes that."""
        chances, reached = [], 1.0
        for accepted in range(drafted + 1):
            right = self.acceptance(sequence_id, first + accepted)
            chances += [(reached * (1 - right) * share, accepted, 2 + r) for r, share in enumerate(self.ranks)]
            reached *= right
        chances.append((reached, drafted, 1))
        return [
            (accepted, rank, self.rank(sequence_id, first + accepted) == rank)
            for _, accepted, rank in sorted(chances, reverse=True)[:count]
        ]
