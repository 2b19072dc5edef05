"""Learns online what a step costs: recursive least squares with forgetting, over a few features."""

from __future__ import annotations

import math
from operator import mul

FORGET = 0.95
"""The weight of an observation is multiplied by this for each later one: the last twenty or so decide."""
TOKEN_SHARE = 1 / 32
"""The first guess of a token's cost, as a share of the cost of a step by itself: loading the weights is most of a step.
The same share of that is what a token to verify costs more, and of that again, what reading a token's KV costs."""
_SHORTEST = 0.5
"""A step that took a smaller share of its expected time weighs as if it had taken this share."""


class LinearCost:
    """Seconds = coefficients · features, all coefficients at least 0.

    Recursive least squares on relative errors: features are divided by the measured seconds, and the model is to give
    1. So a step that stalled weighs next to nothing, and units do not matter; nor can a step that failed at once weigh
    more than a few (`_SHORTEST`). Of earlier observations only what speaks of the same direction is forgotten (Cao and
    Schwartz, Automatica 36, 2000, section 3): what a token costs stays known while all steps have one size.
    Coefficients are first guessed to be in the proportions of `guess`. Before the first observation a step takes
    `initial_seconds`, whatever its size. The first feature is never 0.
    """

    def __init__(self, guess: tuple[float, ...], initial_seconds: float = 0.0) -> None:
        self._guess = guess
        self.coefficients = [initial_seconds, *[0.0] * (len(guess) - 1)]
        self._information: list[list[float]] = []
        """A row for each feature."""

    @property
    def known(self) -> bool:
        return bool(self._information)

    def predict(self, *features: float) -> float:
        """Features that are not given are 0."""
        return sum(map(mul, self.coefficients, features))

    def observe(self, seconds: float, *features: float) -> None:
        if not math.isfinite(seconds) or seconds <= 0:
            return
        if not self._information:
            unit = seconds / sum(map(mul, self._guess, features))
            self.coefficients = [unit * share for share in self._guess]
            # The guess weighs so little that any few observations overrule it.
            weights = [((1 - FORGET) / coefficient) ** 2 for coefficient in self.coefficients]
            self._information = [
                [weight if i == j else 0.0 for j in range(len(weights))] for i, weight in enumerate(weights)
            ]
        unit = max(seconds, _SHORTEST * self.predict(*features))
        x = [feature / unit for feature in features] + [0.0] * (len(self._guess) - len(features))
        before, coefficients = self._information, self.coefficients
        spoken = [sum(map(mul, row, x)) for row in before]
        share = (1 - FORGET) / sum(map(mul, spoken, x))
        lost, wanted = share * sum(map(mul, spoken, coefficients)), seconds / unit
        right = [
            sum(map(mul, row, coefficients)) - lost * u + wanted * feature
            for row, u, feature in zip(before, spoken, x, strict=True)
        ]
        self._information = [
            [a + feature * b - share * u * v for a, b, v in zip(row, x, spoken, strict=True)]
            for row, feature, u in zip(before, x, spoken, strict=True)
        ]
        found = _least_squares(self._information, right)
        if found is None:
            self._information = []  # rounding has left nothing to solve: the next observation begins anew
        else:
            self.coefficients = found


def _least_squares(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solves a small positive definite system; what would be negative is left out, as 0. None where rounding left no
    such system."""
    places = list(range(len(right)))
    while True:
        found = _solution([[*(matrix[i][j] for j in places), right[i]] for i in places])
        if found is None:
            return None
        lowest = min(found)
        if lowest >= 0:
            whole = [0.0] * len(right)
            for place, value in zip(places, found, strict=True):
                whole[place] = value
            return whole
        del places[found.index(lowest)]


def _solution(rows: list[list[float]]) -> list[float] | None:
    """By elimination, of a system whose last column is the right side. Plain loops: this runs for every step."""
    count = len(rows)
    for k in range(count):
        pivot = rows[k]
        if not 0 < pivot[k] < math.inf:
            return None
        for i in range(k + 1, count):
            row = rows[i]
            factor = row[k] / pivot[k]
            for j in range(k + 1, count + 1):
                row[j] -= factor * pivot[j]
    found = [0.0] * count
    for k in range(count - 1, -1, -1):
        row = rows[k]
        value = row[count]
        for j in range(k + 1, count):
            value -= row[j] * found[j]
        found[k] = value / row[k]
    return found
