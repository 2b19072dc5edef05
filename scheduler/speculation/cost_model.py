"""Learns online what a step costs: recursive least squares with forgetting, over a few features."""

from __future__ import annotations

import math
from operator import mul

FORGET = 0.95
"""By so much an observation counts less for each one after it: the last twenty or so decide, as for acceptance."""


class LinearCost:
    """Seconds = coefficients · features, all coefficients at least 0.

    Recursive least squares on relative errors: features are divided by the measured seconds, and the model is to give
    1. So a step that stalled weighs next to nothing, and units do not matter. Of earlier observations only what speaks
    of the same direction is forgotten (Cao and Schwartz, Automatica 36, 2000, section 3): what a token costs stays
    known while all steps have one size. Coefficients are first guessed to be in the proportions of `guess`. Before the
    first observation a step takes `initial_seconds`, whatever its size.
    """

    def __init__(self, guess: tuple[float, ...], initial_seconds: float = 0.0) -> None:
        self._guess = guess
        self.coefficients = [initial_seconds] + [0.0] * (len(guess) - 1)
        self._information: list[list[float]] = []

    @property
    def known(self) -> bool:
        return bool(self._information)

    def predict(self, *features: float) -> float:
        return sum(map(mul, self.coefficients, features))

    def observe(self, seconds: float, *features: float) -> None:
        if not math.isfinite(seconds) or seconds <= 0:
            return
        if not self._information:
            unit = seconds / sum(map(mul, self._guess, features))
            self.coefficients = [unit * share for share in self._guess]
            # The guess weighs so little that any few observations overrule it.
            self._information = [[0.0] * len(features) for _ in features]
            for place, coefficient in enumerate(self.coefficients):
                self._information[place][place] = ((1 - FORGET) / coefficient) ** 2
        scaled = [feature / seconds for feature in features]
        along = [sum(map(mul, row, scaled)) for row in self._information]
        forgotten = (1 - FORGET) / sum(map(mul, along, scaled))
        before, kept, right = sum(map(mul, along, self.coefficients)), [], []
        for row, a, x in zip(self._information, along, scaled, strict=True):
            right.append(sum(map(mul, row, self.coefficients)) - forgotten * a * before + x)
            kept.append([known - forgotten * a * b + x * y for known, b, y in zip(row, along, scaled, strict=True)])
        self._information = kept
        self.coefficients = _least_squares(kept, right)


def _least_squares(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves a small positive definite system; what would be negative is left out, as 0."""
    places = list(range(len(right)))
    while True:
        rows = [[*(matrix[i][j] for j in places), right[i]] for i in places]
        for place, pivot in enumerate(rows):
            for other in rows:
                if other is not pivot and (factor := other[place] / pivot[place]):
                    other[place:] = [a - factor * b for a, b in zip(other[place:], pivot[place:], strict=True)]
        found = {i: row[-1] / row[place] for place, (i, row) in enumerate(zip(places, rows, strict=True))}
        lowest = min(places, key=found.__getitem__)
        if found[lowest] >= 0:
            return [found.get(i, 0.0) for i in range(len(right))]
        places.remove(lowest)
