"""Learns what a step costs while running: a robust linear fit over a few features."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from operator import mul

_RECENT = 5
_HALF_LIFE = 400
"""So many observations later, a bin counts half as much as a new one."""
_MIN_WEIGHT = 0.05
_PRIOR_WEIGHT = 0.01
_BINS_PER_DOUBLING = 3
_MAX_BINS = 64
_REFIT_AT_LEAST_EVERY = 64

Features = tuple[float, ...]


@dataclass(slots=True)
class _Bin:
    """The last observations with about the same features, as (seconds, features), and when the latest came."""

    recent: deque[tuple[float, Features]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    latest: int = 0

    def median(self) -> tuple[float, Features]:
        """The lower median: a slow step (a compilation, say) does not count once there is a second observation."""
        return sorted(self.recent)[(len(self.recent) - 1) // 2]


class CostFit:
    """Seconds = coefficients · features, all coefficients at least 0.

    The last few observations with similar features share a bin, and the coefficients are fitted to the bins' medians.
    So a slow step does no harm, and the bins of one way of working keep its costs while another one is in use: plain
    least squares with forgetting would lose the slope as soon as all steps have the same size. Coefficients that the
    bins leave open are taken to be in the proportions of `prior`.
    """

    def __init__(self, initial_seconds: float, prior: Features) -> None:
        self._initial = initial_seconds
        self._prior = prior
        self._bins: dict[tuple[int, ...], _Bin] = {}
        self._refit_at = 0
        self.observations = 0
        self.coefficients: Features | None = None
        """None before the first observation."""

    def observe(self, features: Features, seconds: float) -> None:
        if not math.isfinite(seconds) or seconds < 0:
            return
        self.observations += 1
        key = tuple(map(_place, features))
        found = self._bins.get(key)
        if found is None:
            if len(self._bins) == _MAX_BINS:
                del self._bins[min(self._bins, key=lambda other: self._bins[other].latest)]
            found = self._bins[key] = _Bin()
        found.recent.append((seconds, features))
        found.latest = self.observations
        if self.observations >= self._refit_at:
            self.coefficients = self._fit()
            self._refit_at = self.observations + min(_REFIT_AT_LEAST_EVERY, 1 + self.observations // 8)

    def predict(self, features: Features) -> float:
        if self.coefficients is None:
            return self._initial
        return sum(map(mul, self.coefficients, features))

    def _fit(self) -> Features:
        bins = list(self._bins.values())
        points = [found.median() for found in bins]
        weights = [
            len(found.recent) / _RECENT * max(_MIN_WEIGHT, 0.5 ** ((self.observations - found.latest) / _HALF_LIFE))
            for found in bins
        ]
        coefficients = self._solve(points, weights)
        if len(points) <= len(coefficients):
            return coefficients
        # Bins that are off by more than the common scatter count less: one step of Huber's weights.
        residuals = [abs(sum(map(mul, coefficients, features)) - seconds) for seconds, features in points]
        scale = 2 * sorted(residuals)[len(residuals) // 2] + 1e-9
        robust = [w * scale / r if r > scale else w for w, r in zip(weights, residuals, strict=True)]
        return self._solve(points, robust)

    def _solve(self, points: list[tuple[float, Features]], weights: list[float]) -> Features:
        """Weighted least squares with the prior as weak observations. A negative coefficient is noise: 0 instead."""
        total = sum(weights)
        seconds = [point[0] for point in points]
        columns = list(zip(*(features for _, features in points), strict=True))
        weighted = [list(map(mul, weights, column)) for column in columns]
        mean_seconds = sum(map(mul, weights, seconds)) / total
        size = len(self._prior)
        means = [sum(column) / total for column in weighted]
        active = [i for i in range(size) if means[i] > 0]
        scale = mean_seconds / sum(map(mul, self._prior, means))
        answers = {i: sum(map(mul, weighted[i], seconds)) for i in active}
        products: dict[int, dict[int, float]] = {i: {} for i in active}
        for i in active:
            for j in active:
                if j <= i:
                    products[i][j] = products[j][i] = sum(map(mul, weighted[i], columns[j]))
        # A feature that was never seen costs what the prior says, not 0.
        result = [0.0 if means[i] > 0 else self._prior[i] * scale for i in range(size)]
        while active:
            matrix = [[*(products[i][j] for j in active), answers[i]] for i in active]
            for place, i in enumerate(active):
                # The weight is relative, so that fading all bins alike changes nothing.
                matrix[place][place] += total * _PRIOR_WEIGHT * means[i] ** 2
                matrix[place][-1] += total * _PRIOR_WEIGHT * means[i] ** 2 * self._prior[i] * scale
            solution = _eliminate(matrix)
            worst = min(range(len(active)), key=lambda place: solution[place] * means[active[place]])
            if solution[worst] >= 0:
                for place, i in enumerate(active):
                    result[i] = solution[place]
                break
            del active[worst]
        return tuple(result)


@lru_cache(maxsize=4096)
def _place(value: float) -> int:
    """The place of a feature's value in the key of its bin. Cached: most values are counts that come again."""
    return round(_BINS_PER_DOUBLING * math.log2(1 + value)) if value else 0


def _eliminate(matrix: list[list[float]]) -> list[float]:
    """Solves a small positive definite system, given as rows with the right side in the last column."""
    size = len(matrix)
    for pivot in range(size):
        row = matrix[pivot]
        for below in matrix[pivot + 1 :]:
            factor = below[pivot] / row[pivot]
            if factor:
                for column in range(pivot, size + 1):
                    below[column] -= factor * row[column]
    solution = [0.0] * size
    for pivot in range(size - 1, -1, -1):
        row = matrix[pivot]
        known = sum(row[column] * solution[column] for column in range(pivot + 1, size))
        solution[pivot] = (row[size] - known) / row[pivot]
    return solution
