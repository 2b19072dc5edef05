"""What a draft's confidence in its tokens is worth, as learned from what became of them.

A confidence is a number from 0 to 255, one for each draft token. What chance it stands for is counted by bins, so that
any measure will do that rises with the chance. The chance that a token is taken takes in that those before it were.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Items
from itertools import accumulate
from operator import mul

MOST_CONFIDENCE = 255
_BINS = 16
_BIN_WIDTH = (MOST_CONFIDENCE + 1) // _BINS
_PRIOR_WEIGHT = 8.0
_FORGET = 0.995
# Of a token whose draft says nothing.
_UNKNOWN_CHANCE = 0.5


class ConfidenceBins:
    """How often tokens of about a confidence were taken, given those before them were; what is long ago counts less."""

    def __init__(self) -> None:
        centers = [(place + 0.5) / _BINS for place in range(_BINS)]
        self._taken = [center * _PRIOR_WEIGHT for center in centers]
        self._tried = [_PRIOR_WEIGHT] * _BINS

    def observe(self, confidences: bytes, accepted: int) -> None:
        """Of the verified tokens with these confidences the first `accepted` were taken."""
        for place, confidence in enumerate(confidences[: accepted + 1]):
            which = confidence // _BIN_WIDTH
            self._tried[which] = self._tried[which] * _FORGET + 1.0
            self._taken[which] = self._taken[which] * _FORGET + (place < accepted)

    def chance(self, confidence: int) -> float:
        """That a token with this confidence is taken, if those before it are."""
        which = confidence // _BIN_WIDTH
        return self._taken[which] / self._tried[which]

    def chances(self, confidences: bytes, count: int) -> list[float]:
        """For each of `count` draft tokens the chance that it is taken: falling from one to the next."""
        single = [self.chance(confidence) for confidence in confidences]
        return list(accumulate(single or [_UNKNOWN_CHANCE] * count, mul))


def most_promising(chances: Items[Items[float]], room: int) -> list[int]:
    """How many leading tokens of each sequence to verify where only `room` tokens can be: those most likely taken.

    A token is only worth anything together with those before it, and is never likelier to be taken than they are, so
    the likeliest next ones, one at a time, are the best choice (TETRIS, arXiv 2502.15197, section 4).
    """
    lengths = [0] * len(chances)
    heap = [(-found[0], index) for index, found in enumerate(chances) if found]
    heapq.heapify(heap)
    while heap and room > 0:
        _, index = heapq.heappop(heap)
        lengths[index] += 1
        room -= 1
        if lengths[index] < len(chances[index]):
            heapq.heappush(heap, (-chances[index][lengths[index]], index))
    return lengths
