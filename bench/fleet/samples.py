"""What is kept of a simulated day: means over intervals, and percentiles of what requests waited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.fleet.speeds import Floats


class Samples:
    """Rows of one interval each. Numbers of a step are added up and divided by the steps at the interval's end."""

    def __init__(self, interval: float, begin: float, end: float) -> None:
        self._interval, self._end = interval, end
        self._next = begin
        self._begin = begin
        self._sums: dict[str, float] = {}
        self._steps = 0
        self._waits: list[tuple[Floats, Floats]] = []
        self.rows: list[dict[str, float]] = []

    def add(self, now: float, numbers: Mapping[str, float], waits: Floats, arrived: Floats) -> None:
        """A step that ends at `now`. `waits` for the first token, of so many that arrived in each cell."""
        if not self._begin < now <= self._end:
            return
        for name, number in numbers.items():
            self._sums[name] = self._sums.get(name, 0.0) + number
        self._steps += 1
        self._waits.append((waits, arrived))
        if now >= self._next + self._interval - 1e-6:
            self._close()

    def _close(self) -> None:
        waits = np.concatenate([one for one, _ in self._waits])
        counts = np.concatenate([one for _, one in self._waits])
        row = {"time": self._next + self._interval / 2}
        row |= {name: rounded(number / self._steps) for name, number in self._sums.items()}
        row |= {f"first_token_{name}": rounded(value) for name, value in percentiles(waits, counts).items()}
        self.rows.append(row)
        self._next += self._interval
        self._sums, self._steps, self._waits = {}, 0, []


def percentiles(values: Floats, counts: Floats) -> dict[str, float]:
    """p50 and p99 of values that occur so often each; 0 of none."""
    there = counts > 0
    values, counts = values[there], counts[there]
    if not values.size:
        return {"p50": 0.0, "p99": 0.0}
    order = np.argsort(values)
    up_to = np.cumsum(counts[order])
    found = {}
    for name, share in (("p50", 0.50), ("p99", 0.99)):
        place = min(int(np.searchsorted(up_to, share * up_to[-1])), values.size - 1)
        found[name] = float(values[order][place])
    return found


def rounded(number: float) -> float:
    """To five digits, so that a record stays readable."""
    return float(f"{number:.5g}")


def totals_of(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The same, floats to six digits."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in numbers.items()}
