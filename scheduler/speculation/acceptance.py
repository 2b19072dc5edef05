"""How likely draft tokens are to be accepted: by place, and by the draft's own confidence."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from scheduler.speculation.cost_model import FORGET

MAX_CONFIDENCE = 255
"""A confidence is a number from 0 to 255 for each draft token, a byte on the wire."""
_BINS = 16
"""Bins of confidence, each with a chance of its own: more bins would be too empty to learn from."""
PRIOR_CHANCE = 0.7
"""The chance of a draft token before any was observed: high enough that drafting is tried."""
_PRIOR_WEIGHT = 4.0
"""The prior chance counts as much as so many observed tokens."""


class ModelAcceptance:
    """The chance of a draft model's token, given that those before it were accepted, by place and by confidence."""

    def __init__(self, places: int) -> None:
        self._taken = [0.0] * places
        self._tried = [0.0] * places
        self._bins_taken = [(which + 0.5) / _BINS * _PRIOR_WEIGHT for which in range(_BINS)]
        self._bins_tried = [_PRIOR_WEIGHT] * _BINS

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return any(self._tried)

    @property
    def rate(self) -> float:
        """Over all places."""
        return (sum(self._taken) + PRIOR_CHANCE * _PRIOR_WEIGHT) / (sum(self._tried) + _PRIOR_WEIGHT)

    @property
    def chances(self) -> list[float]:
        """By place, each drawn towards that of the place before."""
        chance, found = PRIOR_CHANCE, []
        for taken, tried in zip(self._taken, self._tried, strict=True):
            chance = (taken + _PRIOR_WEIGHT * chance) / (tried + _PRIOR_WEIGHT)
            found.append(chance)
        return found

    def observe(self, taken: float, tried: int, confidences: bytes, accepted: int, sequences: int) -> None:
        """Of `tried` tokens `taken` were accepted; of those with `confidences`, which were verified, `accepted`.

        `sequences` share the model, so that many observations are one round of each.
        """
        keep = 1 - (1 - FORGET) / max(1, sequences)
        all_tried, all_taken = self._tried, self._taken
        for place in range(tried if tried < len(all_tried) else len(all_tried)):
            all_tried[place] = all_tried[place] * keep + 1.0
            all_taken[place] = all_taken[place] * keep + (1.0 if place < accepted else taken - place)
        if not confidences:
            return
        keep = 1 - (1 - FORGET) / _BINS
        for place, confidence in enumerate(confidences[: accepted + 1]):
            which = confidence * _BINS // (MAX_CONFIDENCE + 1)
            self._bins_tried[which] = self._bins_tried[which] * keep + 1.0
            self._bins_taken[which] = self._bins_taken[which] * keep + (place < accepted)

    def chance(self, confidence: int) -> float:
        """The chance of a token with this confidence."""
        which = confidence * _BINS // (MAX_CONFIDENCE + 1)
        return self._bins_taken[which] / self._bins_tried[which]

    def survival(self, confidences: bytes, count: int) -> list[float]:
        """The chance of each of `count` tokens to be accepted with all before it; without confidences, by place."""
        single = [self.chance(one) for one in confidences] or [*self.chances, *[PRIOR_CHANCE] * count][:count]
        return list(accumulate(single, mul))
