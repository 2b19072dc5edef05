"""Learns online what a step costs: recursive least squares with forgetting, over a few features."""

from __future__ import annotations

import math
from operator import mul

FORGET = 0.95
"""By so much an observation counts less for each one after it: the last twenty or so decide, as for acceptance."""
_TOKEN_SHARE = 1 / 32
"""Of a step's base, what a token costs before that was measured: loading the weights is most of a step."""


class LinearCost:
    """Seconds = coefficients · features, all coefficients at least 0; the first feature is the step's own.

    Recursive least squares on relative errors: features are divided by the measured seconds, and the model is to give
    1. So a step that stalled weighs next to nothing, and units do not matter. Of earlier observations only what speaks
    of the same direction is forgotten (Cao and Schwartz, Automatica 36, 2000, section 3): what a token costs stays
    known while all steps have one size. Before the first observation a step costs `initial_seconds`, its tokens nothing.
    """

    def __init__(self, features: int, initial_seconds: float = 0.0) -> None:
        self.coefficients = [initial_seconds] + [0.0] * (features - 1)
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
            # The proportions are a guess, which weighs so little that any two observations overrule it.
            guess = [1.0] + [_TOKEN_SHARE] * (len(features) - 1)
            unit = seconds / sum(map(mul, guess, features))
            self.coefficients = [unit * share for share in guess]
            self._information = [[0.0] * len(guess) for _ in guess]
            for place, coefficient in enumerate(self.coefficients):
                self._information[place][place] = ((1 - FORGET) / coefficient) ** 2
        scaled = [feature / seconds for feature in features]
        along = [sum(map(mul, row, scaled)) for row in self._information]
        forgotten = (1 - FORGET) / sum(map(mul, along, scaled))
        self._information = [
            [known - forgotten * a * b + x * y for known, b, y in zip(row, along, scaled, strict=True)]
            for row, a, x in zip(self._information, along, scaled, strict=True)
        ]
        error = 1.0 - sum(map(mul, self.coefficients, scaled))
        gain = _solve(self._information, scaled)
        self.coefficients = [max(0.0, c + g * error) for c, g in zip(self.coefficients, gain, strict=True)]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a small positive definite system, by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for place, pivot in enumerate(rows):
        for other in rows:
            if other is not pivot and (factor := other[place] / pivot[place]):
                other[place:] = [a - factor * b for a, b in zip(other[place:], pivot[place:], strict=True)]
    return [row[-1] / row[place] for place, row in enumerate(rows)]
