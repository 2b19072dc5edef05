"""Learns online what a step costs: least squares with forgetting, over a few features."""

from __future__ import annotations

from operator import mul

FORGET = 0.95
"""The weight of an observation is multiplied by this for each later one: the last twenty or so decide."""
TOKEN_SHARE = 1 / 32
"""The first guess of a token's cost, as a share of the cost of a step by itself: loading the weights is most of a step.
The same share of that is what a token to verify costs more, and of that again, what reading a token's KV costs."""
_SHORTEST = 0.5
"""A step that took a smaller share of its expected time weighs as if it had taken this share."""


def _is_possible(seconds: float) -> bool:
    """Workers say how long they took, and may say anything. Squares of the extremes would have no place in a float."""
    return 1e-9 < seconds < 1e9


class MeanSeconds:
    """The mean of times, weighted so that relative errors count: one that stalled counts for next to nothing, and a
    much shorter one no more than a few (`_SHORTEST`). Before the first it is `initial`."""

    def __init__(self, initial: float = 0.0) -> None:
        self._sum = self._squares = 0.0
        self.seconds = initial

    def observe(self, seconds: float) -> None:
        if _is_possible(seconds):
            unit = max(seconds, _SHORTEST * self.seconds)
            self._sum = self._sum * FORGET + seconds / unit**2
            self._squares = self._squares * FORGET + 1 / unit**2
            self.seconds = self._sum / self._squares


class LinearCost:
    """Seconds = coefficients · features, all coefficients at least 0.

    Least squares on relative errors: features are divided by the measured seconds, and the model is to give 1. So a
    step that stalled weighs next to nothing, and units do not matter; nor can a step that failed at once weigh more
    than a few (`_SHORTEST`, by the coefficients that were asked for last). Of earlier observations only what speaks of
    the same direction is forgotten (Cao and Schwartz, Automatica 36, 2000, section 3): what a token costs stays known
    while all steps have one size. Coefficients are first guessed to be in the proportions of `guess`, and may be wrong
    by amounts in the proportions of `doubt`; before the first observation they are 0. The first feature is never 0.

    Where times vary because what is done varies, their mean is wanted: then each has the same weight, by a `unit` of
    time that does not vary with them.
    """

    def __init__(self, guess: tuple[float, ...], doubt: tuple[float, ...] | None = None) -> None:
        self._guess = guess
        self._doubt = doubt or guess
        self._solution = [0.0] * len(guess)
        self._solved = True
        self._matrix: list[list[float]] = []
        """Of the normal equations, a row for each feature; `_right` is their right side."""
        self._right: list[float] = []

    @property
    def known(self) -> bool:
        return bool(self._matrix)

    @property
    def coefficients(self) -> list[float]:
        """Solved for when they are asked for, since steps come more often."""
        if not self._solved:
            self._solution, self._solved = _least_squares(self._matrix, self._right), True
        return self._solution

    def predict(self, *features: float) -> float:
        """Features that are not given are 0."""
        return sum(map(mul, self.coefficients, features))

    def observe(self, seconds: float, *features: float, unit: float = 0.0) -> None:
        """Without a `unit`, errors count relative to the seconds."""
        if not (_is_possible(unit or seconds) and 0 <= seconds < 1e9):
            return
        if not self._matrix:
            first, doubted = (sum(map(mul, shares, features)) for shares in (self._guess, self._doubt))
            self._solution = [seconds / first * share for share in self._guess]
            # The guess weighs so little that any few observations overrule it.
            weights = [((1 - FORGET) * doubted / ((unit or seconds) * share)) ** 2 for share in self._doubt]
            self._right = list(map(mul, weights, self._solution))
            self._matrix = [[w if i == j else 0.0 for j in range(len(weights))] for i, w in enumerate(weights)]
        if not unit:
            unit = seconds
            if seconds < _SHORTEST * sum(map(mul, self._solution, features)):
                unit = max(seconds, _SHORTEST * self.predict(*features))
        matrix, right = self._matrix, self._right
        places = range(len(right))
        x = [feature / unit for feature in features] + [0.0] * (len(right) - len(features))
        spoken = [sum(map(mul, row, x)) for row in matrix]
        share = (1 - FORGET) / sum(map(mul, spoken, x))
        lost, wanted = share * sum(map(mul, right, x)), seconds / unit
        # Plain loops, in place: this runs for every step.
        for i in places:
            feature, forgotten, row = x[i], share * spoken[i], matrix[i]
            right[i] += wanted * feature - lost * spoken[i]
            for j in places:
                row[j] += feature * x[j] - forgotten * spoken[j]
        self._solved = False


def _least_squares(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves a small positive definite system by elimination; what would be negative is left out, as 0, and so is what
    rounding has left nothing of."""
    places, found = list(range(len(right))), [0.0] * len(right)
    while places:
        rows = [[*(matrix[i][j] for j in places), right[i]] for i in places]
        for k, pivot in enumerate(rows):
            for row in rows[k + 1 :]:
                factor = row[k] / pivot[k] if pivot[k] > 0 else 0.0
                row[k:] = [a - factor * b for a, b in zip(row[k:], pivot[k:], strict=True)]
        solution = [0.0] * len(rows)
        for k in reversed(range(len(rows))):
            rest = rows[k][-1] - sum(map(mul, rows[k][k + 1 : -1], solution[k + 1 :]))
            solution[k] = rest / rows[k][k] if rows[k][k] > 0 else 0.0
        if (lowest := min(solution)) >= 0:
            for place, value in zip(places, solution, strict=True):
                found[place] = value
            break
        del places[solution.index(lowest)]
    return found
