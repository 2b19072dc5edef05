"""What a step takes, as a sum of costs, out of steps that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.profiling.step_log import TimedStep
from deploy.planning.virtual_cell import whole_blocks

_TURNS = 8
"""Of weighing and solving. After three the coefficients hardly change."""
_HELD_OUT = 4
"""One step in so many is predicted by a fit of the others."""
_LARGEST_BLOCK = 32
_CLEARLY = 0.9
"""Of the error without blocks: one that is as large may be less by chance."""
_COEFFICIENTS = 3


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Seconds of a step: `step` for each pass, `token` for each token of a pass, these rounded up to blocks of
    `block_tokens`, and `kv_token` for each token of KV that a pass reads.

    `error` is the median of the relative errors, without their sign, of steps that the fit had not seen.
    """

    step: float
    token: float
    kv_token: float
    block_tokens: int
    error: float
    steps: int


def law_of(steps: Sequence[TimedStep]) -> StepLaw:
    """By least squares over all steps, with errors relative to what is predicted: steps of all lengths count alike, and
    the sum of what is predicted is that of what was measured. No coefficient is negative.

    Blocks are assumed where they make the error clearly less. Raises ValueError for too few steps.
    """
    if len(steps) < _HELD_OUT * _COEFFICIENTS:
        raise ValueError(f"{len(steps)} steps were measured, must be at least {_HELD_OUT * _COEFFICIENTS}")
    seconds = np.array([one.seconds for one in steps])
    held_out = np.arange(len(steps)) % _HELD_OUT == 0

    def error(block: int) -> float:
        x = _features(steps, block)
        found = _fit(x[~held_out], seconds[~held_out])
        return float(np.median(np.abs(x[held_out] @ found / seconds[held_out] - 1)))

    block = min(range(1, _LARGEST_BLOCK + 1), key=error)
    if error(block) > _CLEARLY * error(1):
        block = 1
    step, token, kv_token = map(float, _fit(_features(steps, block), seconds))
    return StepLaw(step, token, kv_token, block, error(block), len(steps))


def _features(steps: Sequence[TimedStep], block: int) -> np.ndarray:
    """Passes, tokens in whole blocks, and tokens of KV read, of each step: [steps, 3]."""
    rows = []
    for one in steps:
        passes = len(one.pass_tokens)
        rows.append((passes, sum(whole_blocks(each, block) for each in one.pass_tokens), passes * one.kv_tokens))
    return np.array(rows, dtype=float)


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
