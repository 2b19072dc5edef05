"""Learns what a draft's confidence in its tokens is worth, from whether the target accepts them.

A confidence is a number from 0 to 255, one for each draft token. The chance that it stands for is counted in bins, so
any measure that rises with the chance will do. The chance of a token includes that all tokens before it are accepted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Items
from itertools import accumulate
from operator import mul

MAX_CONFIDENCE = 255
_BINS = 16
_BIN_WIDTH = (MAX_CONFIDENCE + 1) // _BINS
_PRIOR_WEIGHT = 8.0
_FORGET = 0.995
# The chance of a token without a confidence.
_UNKNOWN_CHANCE = 0.5


class ConfidenceBins:
    """How often tokens of similar confidence were accepted, if those before them were; older ones count less."""

    def __init__(self) -> None:
        centers = [(place + 0.5) / _BINS for place in range(_BINS)]
        self._taken = [center * _PRIOR_WEIGHT for center in centers]
        self._tried = [_PRIOR_WEIGHT] * _BINS

    def observe(self, confidences: bytes, accepted: int) -> None:
        """Of the verified tokens with these confidences, the first `accepted` were accepted."""
        for place, confidence in enumerate(confidences[: accepted + 1]):
            which = confidence // _BIN_WIDTH
            self._tried[which] = self._tried[which] * _FORGET + 1.0
            self._taken[which] = self._taken[which] * _FORGET + (place < accepted)

    def chance(self, confidence: int) -> float:
        """The chance that a token with this confidence is accepted, if those before it are."""
        which = confidence // _BIN_WIDTH
        return self._taken[which] / self._tried[which]

    def chances(self, confidences: bytes, count: int) -> list[float]:
        """The chance of each of `count` draft tokens to be accepted, falling from one to the next."""
        single = [self.chance(confidence) for confidence in confidences]
        return list(accumulate(single or [_UNKNOWN_CHANCE] * count, mul))


def most_promising(chances: Items[Items[float]], room: int) -> list[int]:
    """How many leading tokens of each sequence to verify if only `room` tokens can be: those most likely accepted.

    A token is worth nothing without those before it, and is never likelier to be accepted than they are. So taking the
    likeliest next token, one at a time, is best (TETRIS, arXiv 2502.15197, section 4).
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
