"""Where requests go: to cells that serve, in proportion to their targets, unless a cell has more than its share."""

from __future__ import annotations

import numpy as np

from bench.fleet.speeds import Floats
from services.scheduler_client.cell_choice import BALANCE


def weights(sequences: Floats, targets: Floats) -> Floats:
    """By which arrivals are spread, in sum 1; all 0 where no cell serves. `targets` is 0 for cells that do not.

    As gateways do it, a cell takes no request while its sequences for each target are above its bound.
    """
    mean = sequences[targets > 0].sum() / max(1.0, float(targets.sum()))
    # Below a sequence for each target nothing is uneven.
    taking = np.where(sequences <= np.maximum(BALANCE * mean, 1.0) * targets, targets, 0.0)
    total = float(taking.sum())
    return taking / total if total else taking


def spread(rng: np.random.Generator, arrivals: int, shares: Floats) -> Floats:
    """So many requests, each to a cell by these shares."""
    return rng.multinomial(arrivals, shares).astype(np.float64)
