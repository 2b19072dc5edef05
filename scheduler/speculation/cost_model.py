"""Learns online what a step costs: recursive least squares with forgetting, over a few features."""

from __future__ import annotations

import math
from operator import mul

FORGET = 0.95
"""By so much an observation counts less for each one after it: the last twenty or so decide, as for acceptance."""
_SHORTEST = 0.5
"""Of what was expected: a step that took less weighs as if it had taken so much, no more than four usual ones."""


class LinearCost:
    """Seconds = coefficients · features, all coefficients at least 0.

    Recursive least squares on relative errors: features are divided by the measured seconds, and the model is to give
    1. So a step that stalled weighs next to nothing, and units do not matter; nor can a step that failed at once weigh
    more than a few (`_SHORTEST`). Of earlier observations only what speaks of the same direction is forgotten (Cao and
    Schwartz, Automatica 36, 2000, section 3): what a token costs stays known while all steps have one size.
    Coefficients are first guessed to be in the proportions of `guess`. Before the first observation a step takes
    `initial_seconds`, whatever its size.
    """

    def __init__(self, guess: tuple[float, float, float], initial_seconds: float = 0.0) -> None:
        self._guess = guess
        self.coefficients = [initial_seconds, 0.0, 0.0]
        self._information: tuple[float, ...] = ()
        """The upper triangle, row by row."""

    @property
    def known(self) -> bool:
        return bool(self._information)

    def predict(self, x: float, y: float = 0.0, z: float = 0.0) -> float:
        p, q, r = self.coefficients
        return p * x + q * y + r * z

    def observe(self, seconds: float, x: float, y: float = 0.0, z: float = 0.0) -> None:
        if not math.isfinite(seconds) or seconds <= 0:
            return
        if not self._information:
            unit = seconds / sum(map(mul, self._guess, (x, y, z)))
            self.coefficients = [unit * share for share in self._guess]
            # The guess weighs so little that any few observations overrule it.
            a, d, f = (((1 - FORGET) / coefficient) ** 2 for coefficient in self.coefficients)
            self._information = (a, 0.0, 0.0, d, 0.0, f)
        unit = max(seconds, _SHORTEST * self.predict(x, y, z))
        x, y, z, seconds = x / unit, y / unit, z / unit, seconds / unit
        (a, b, c, d, e, f), (p, q, r) = self._information, self.coefficients
        u, v, w = a * x + b * y + c * z, b * x + d * y + e * z, c * x + e * y + f * z
        share = (1 - FORGET) / (u * x + v * y + w * z)
        lost = share * (u * p + v * q + w * r)
        i = a * p + b * q + c * r - lost * u + x * seconds
        j = b * p + d * q + e * r - lost * v + y * seconds
        k = c * p + e * q + f * r - lost * w + z * seconds
        a, b, c = a + x * x - share * u * u, b + x * y - share * u * v, c + x * z - share * u * w
        d, e, f = d + y * y - share * v * v, e + y * z - share * v * w, f + z * z - share * w * w
        self._information = (a, b, c, d, e, f)
        g, h, m = d * f - e * e, c * e - b * f, b * e - c * d
        n, o, s = a * f - c * c, b * c - a * e, a * d - b * b
        whole = a * g + b * h + c * m
        if not 0 < whole < math.inf:
            self._information = ()  # rounding has left nothing to solve: the next observation begins anew
            return
        found = [(g * i + h * j + m * k) / whole, (h * i + n * j + o * k) / whole, (m * i + o * j + s * k) / whole]
        if min(found) < 0:
            found = _least_squares([[a, b, c], [b, d, e], [c, e, f]], [i, j, k])
        self.coefficients = found


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
