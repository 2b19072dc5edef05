"""How likely proposed tokens are to be accepted, by their place in the proposal."""

from __future__ import annotations

from spool.scheduler.speculation.cost_model import FORGET

PRIOR_CHANCE = 0.7
"""The chance of a draft token before any was observed: high enough that drafting is tried."""
_PRIOR_WEIGHT = 4.0
"""The prior chance counts as much as so many observed tokens."""


class Acceptance:
    """The chance of a token of one proposer, given that those before it were accepted, by place."""

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

        `sequences` share the proposer, so that many observations are one round of each.
        """
        keep = kept(sequences)
        tried, taken = self._tried, self._taken
        for place in range(min(accepted + 1, requested, len(tried))):
            tried[place] = tried[place] * keep + 1.0
            taken[place] = taken[place] * keep + (place < accepted)


class LookupAcceptance(Acceptance):
    """Of what lookup proposes, where it finds something: in the `share` of the rounds in which it might."""

    def __init__(self, places: int) -> None:
        super().__init__(places)
        self.share = 0.0

    def looked_up(self, found: bool, sequences: int) -> None:
        """Lookup was asked for a round of one of so many sequences."""
        self.share += (1 - kept(sequences)) * (found - self.share)


def kept(sequences: int) -> float:
    """The weight of an observation is multiplied by this for each later one, of any of so many sequences."""
    return 1 - (1 - FORGET) / max(1, sequences)
