"""The control law: target utilisation with hysteresis, an upscale delay and a cool-down. It has no clock and no I/O."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from spool.deploy.config.placement import HYSTERESIS, WorkerAutoscaling

# A rounding error must not add a replica.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Sample:
    """What the load of one moment asks for: at least `low` and at most `high` replicas."""

    time: float
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """Fewer than `at_least` replicas are too few, more than `at_most` too many; `wanted` lies between the two."""

    wanted: int
    at_least: int
    at_most: int
    now: Sample


class GroupControl:
    """Decides on the number of replicas of one group.

    The load is a number of fully used replicas. The group grows when its replicas were used for more than `utilisation`
    during the whole upscale delay, so a short peak adds none. It shrinks when fewer replicas would have been used for
    at most `utilisation` less HYSTERESIS during the whole cool-down (`downscale_delay_seconds`). A control that has not
    watched for that long changes nothing in that direction.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._samples: deque[Sample] = deque()
        self._wanted: int | None = None

    def decide(
        self, load: float, in_use: int, rules: WorkerAutoscaling, now: float, highest: int | None = None
    ) -> GroupDecision:
        """`in_use` replicas are up; `now` is monotonic, in seconds. `highest` limits `max_replicas` further."""
        most = rules.max_replicas if highest is None else max(rules.min_replicas, min(rules.max_replicas, highest))
        began = self._began = now if self._began is None else self._began
        up, down = rules.upscale_delay_seconds, rules.downscale_delay_seconds
        low = _replicas(load / rules.utilisation, rules.min_replicas, most)
        high = _replicas(load / (rules.utilisation - HYSTERESIS), rules.min_replicas, most)
        self._samples.append(Sample(now, low, high))
        while self._samples[0].time < now - max(up, down):
            self._samples.popleft()

        at_least, at_most = rules.min_replicas, most
        if now - began >= up:
            at_least = min(most, *(sample.low for sample in self._samples if sample.time >= now - up))
        if now - began >= down:
            recent = max(sample.high for sample in self._samples if sample.time >= now - down)
            at_most = max(at_least, min(most, recent))
        current = in_use if self._wanted is None else self._wanted
        self._wanted = min(max(current, at_least), at_most)
        return GroupDecision(self._wanted, at_least, at_most, self._samples[-1])


def _replicas(load: float, fewest: int, most: int) -> int:
    return min(max(math.ceil(min(load, most) - _ROUNDING), fewest), most)
