"""What a step takes, as a sum of costs, out of steps that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_TURNS = 8
"""Of weighing and solving. After three the coefficients hardly change."""
_HELD_OUT = 4
"""Every so manieth step is predicted by a fit of the others."""


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Seconds = coefficients · features. `error` is the median of the relative errors, without their sign, of steps
    that the fit had not seen."""

    coefficients: tuple[float, ...]
    error: float
    steps: int


def law_of(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> StepLaw:
    """By least squares over all steps, with errors relative to what is predicted, so that steps of all lengths count
    alike and the sum of what is predicted is that of what was measured. No coefficient is negative.

    `features` have shape [steps, coefficients], all at least 0 and the first one above. Raises ValueError for less
    than two steps for each coefficient.
    """
    x, y = np.asarray(features, dtype=float), np.asarray(seconds, dtype=float)
    if len(y) < 2 * x.shape[1]:
        raise ValueError(f"{len(y)} steps were measured, must be at least {2 * x.shape[1]}")
    held_out = np.arange(len(y)) % _HELD_OUT == 0
    errors = x[held_out] @ _fit(x[~held_out], y[~held_out]) / y[held_out] - 1
    return StepLaw(tuple(map(float, _fit(x, y))), float(np.median(np.abs(errors))), len(y))


def _fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    predicted = y
    found = np.zeros(x.shape[1])
    for _ in range(_TURNS):
        found = _solution(x / predicted[:, None], y / predicted)
        # A step that nothing is expected of would weigh without limit.
        predicted = np.maximum(x @ found, 1e-3 * y)
    return found


def _solution(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least squares; what would be negative is left out, as 0, the lowest first."""
    # Units differ by orders of magnitude.
    scale = np.maximum(np.abs(x).max(axis=0), 1e-300)
    places = list(range(x.shape[1]))
    whole = np.zeros(x.shape[1])
    while places:
        found = np.linalg.lstsq(x[:, places] / scale[places], y, rcond=None)[0]
        if found.min() >= 0:
            whole[places] = found / scale[places]
            break
        del places[int(found.argmin())]
    return whole
