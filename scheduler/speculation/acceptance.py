"""How likely draft tokens are to be accepted, by their place in the proposal."""

from __future__ import annotations

from spool.scheduler.speculation.cost_model import FORGET

PRIOR_CHANCE = 0.7
"""The chance of a draft token before any was observed: high enough that drafting is tried."""
_PRIOR_WEIGHT = 4.0
"""The prior chance counts as much as so many observed tokens."""


class ModelAcceptance:
    """The chance of a draft model's token, given that those before it were accepted, by place."""

    def __init__(self, places: int) -> None:
        self._taken = [0.0] * places
        self._tried = [0.0] * places

    @property
    def chances(self) -> list[float]:
        """By place, each drawn towards that of the place before."""
        chance, found = PRIOR_CHANCE, []
        for taken, tried in zip(self._taken, self._tried, strict=True):
            chance = (taken + _PRIOR_WEIGHT * chance) / (tried + _PRIOR_WEIGHT)
            found.append(chance)
        return found

    def observe(self, accepted: int, requested: int, sequences: int) -> None:
        """Of `requested` tokens the first `accepted` were accepted, and the next one, if any, was not or did not come.

        `sequences` share the model, so that many observations are one round of each.
        """
        keep = 1 - (1 - FORGET) / max(1, sequences)
        tried, taken = self._tried, self._taken
        for place in range(min(accepted + 1, requested, len(tried))):
            tried[place] = tried[place] * keep + 1.0
            taken[place] = taken[place] * keep + (place < accepted)
