"""How likely a draft's tokens are to be accepted: by place, by sequence, and by the draft's own confidence.

All chances are conditional: that a token is proposed and accepted, given that those before it were.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Items
from itertools import accumulate
from operator import mul

from scheduler.speculation.cost_model import FORGET

MAX_CONFIDENCE = 255
"""A confidence is a number from 0 to 255 for each draft token (a byte on the wire)."""
_BINS = 16
"""Confidences are told apart as finely as a few hundred tokens can say something about."""
_PRIOR_CHANCE = 0.7
"""Of a new draft model's tokens: high enough that it is tried, after which it counts for little."""
_PRIOR_WEIGHT = 4.0
"""What was seen of few tokens is drawn towards what was to be expected, as if so many had confirmed that."""


class OwnAcceptance:
    """What the controller remembers of one sequence: `taken` of `tried` draft tokens, older ones for less.

    `length` is the draft length that pays for it, None before that was decided; `probing` while it drafts only to show
    what drafting would yield.
    """

    __slots__ = ("length", "probing", "taken", "tried")

    def __init__(self) -> None:
        self.taken = self.tried = 0.0
        self.length: int | None = None
        self.probing = False

    def observe(self, taken: float, tried: float) -> None:
        self.taken = self.taken * FORGET + taken
        self.tried = self.tried * FORGET + tried


class ModelAcceptance:
    """Acceptance of one draft model's tokens, by their place in the proposal and by their confidence."""

    def __init__(self, places: int) -> None:
        self._taken = [0.0] * places
        self._tried = [0.0] * places
        self._taken_now = [0.0] * places
        self._tried_now = [0] * places
        self.chances = [_PRIOR_CHANCE] * places
        """For each place; where little was seen, that of the place before."""
        self._bins_taken = [(place + 0.5) / _BINS * _PRIOR_WEIGHT for place in range(_BINS)]
        self._bins_tried = [_PRIOR_WEIGHT] * _BINS

    def observe(self, taken: float, tried: int) -> None:
        """Of a proposal `tried` tokens were looked at in their order, and `taken` of them accepted."""
        for place in range(min(tried, len(self._tried))):
            self._tried_now[place] += 1
            self._taken_now[place] += min(1.0, max(0.0, taken - place))

    def end_round(self) -> None:
        """Every sequence has had a round since the last call: what came before counts less, where any was drafted."""
        before = _PRIOR_CHANCE
        for place, tried in enumerate(self._tried_now):
            if tried:
                self._taken[place] = self._taken[place] * FORGET + self._taken_now[place]
                self._tried[place] = self._tried[place] * FORGET + tried
                self._taken_now[place], self._tried_now[place] = 0.0, 0
            before = (self._taken[place] + _PRIOR_WEIGHT * before) / (self._tried[place] + _PRIOR_WEIGHT)
            self.chances[place] = before

    def survival(self, own: OwnAcceptance) -> list[float]:
        """For each place the chance that the token there is accepted with all before it, for this sequence."""
        taken, weight = own.taken, own.tried + _PRIOR_WEIGHT
        return list(accumulate([(taken + _PRIOR_WEIGHT * chance) / weight for chance in self.chances], mul))

    def observe_confidences(self, confidences: bytes, accepted: int) -> None:
        """Of the verified tokens with these confidences, the first `accepted` were accepted."""
        keep = 1 - (1 - FORGET) / _BINS
        for place, confidence in enumerate(confidences[: accepted + 1]):
            which = confidence * _BINS // (MAX_CONFIDENCE + 1)
            self._bins_tried[which] = self._bins_tried[which] * keep + 1.0
            self._bins_taken[which] = self._bins_taken[which] * keep + (place < accepted)

    def chance(self, confidence: int) -> float:
        """The chance of a token with this confidence."""
        which = confidence * _BINS // (MAX_CONFIDENCE + 1)
        return self._bins_taken[which] / self._bins_tried[which]

    def trust(self, confidences: bytes, count: int) -> list[float]:
        """The chance of each of `count` draft tokens to be accepted with all before it; without confidences, by place."""
        return list(accumulate([self.chance(one) for one in confidences] or self.chances[:count], mul))


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


def expected_commit(rate: float, draft_length: int) -> float:
    """Tokens a round is expected to commit: 1 + rate + rate**2 ... up to the draft length."""
    if rate >= 1:
        return draft_length + 1.0
    return float((1 - rate ** (draft_length + 1)) / (1 - rate))
