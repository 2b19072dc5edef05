"""What steps cost and what rounds yield, as measured while running."""

from __future__ import annotations

import math
from collections import deque

_FORGET = 0.95
_RECENT = 9
_FORGET_ROUND = 0.995
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_WEIGHT = 4.0
_ENOUGH = 4


class LinearFit:
    """Seconds of a step against its packed rows: least squares in which older observations fade."""

    def __init__(self, initial_seconds: float) -> None:
        self._initial = initial_seconds
        self.observations = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, packed_rows: int, seconds: float) -> None:
        self.observations += 1
        self._n = self._n * _FORGET + 1
        self._x = self._x * _FORGET + packed_rows
        self._y = self._y * _FORGET + seconds
        self._xx = self._xx * _FORGET + packed_rows * packed_rows
        self._xy = self._xy * _FORGET + packed_rows * seconds

    def predict(self, packed_rows: int) -> float:
        if not self.observations:
            return self._initial
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        if variance < 1e-6 * (1 + mean_x * mean_x):
            return mean_y
        # More rows never take less time: a negative slope is noise.
        slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / variance)
        return max(0.0, mean_y + slope * (packed_rows - mean_x))


class VerifyTimes:
    """Step times of one target, apart for equal-length and ragged groups, since some backends pay for the latter."""

    def __init__(self, initial_seconds: float) -> None:
        self._equal = LinearFit(initial_seconds)
        self._ragged = LinearFit(initial_seconds)
        self._recent = deque([initial_seconds], maxlen=_RECENT)
        self.typical = initial_seconds
        """Lower median of the last steps, so that one slow step (a compilation, say) does not count."""

    def observe(self, packed_rows: int, equal_length: bool, seconds: float) -> None:
        if not math.isfinite(seconds) or seconds < 0:
            return
        (self._equal if equal_length else self._ragged).observe(packed_rows, seconds)
        self._recent.append(seconds)
        self.typical = sorted(self._recent)[(len(self._recent) - 1) // 2]

    def predict(self, packed_rows: int, equal_length: bool) -> float:
        mine, other = (self._equal, self._ragged) if equal_length else (self._ragged, self._equal)
        fit = mine if mine.observations >= _ENOUGH or mine.observations >= other.observations else other
        return fit.predict(packed_rows)


class Acceptance:
    """The chance that the target takes a draft token, given that it took those before."""

    def __init__(self) -> None:
        self._taken = _PRIOR_ACCEPTANCE * _PRIOR_WEIGHT
        self._tried = _PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        return self._taken / self._tried

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted:
            self._taken = self._taken * _FORGET_ROUND + accepted
            self._tried = self._tried * _FORGET_ROUND + accepted + (accepted < drafted)


def expected_commit(rate: float, draft_length: int) -> float:
    """Tokens a round is expected to commit: 1 + rate + rate**2 ... up to the draft length."""
    if rate >= 1:
        return draft_length + 1.0
    return float((1 - rate ** (draft_length + 1)) / (1 - rate))
