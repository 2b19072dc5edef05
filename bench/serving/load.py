"""Open-loop load: when requests arrive, what came of each, and what that says about a server."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

PERCENTILES = (50, 90, 99)


class Ending(Enum):
    ANSWERED = "answered"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds since the load began; `due` is when it arrived, `sent` when the client got to it.

    `deliveries` are the times at which something of its output came.
    """

    due: float
    sent: float = 0.0
    ended: float = 0.0
    ending: Ending = Ending.FAILED
    error: str = ""
    tokens: int = 0
    deliveries: list[float] = field(default_factory=list)

    @property
    def first_token_seconds(self) -> float | None:
        """From its arrival: a client that is late does not make a server look fast."""
        return self.deliveries[0] - self.due if self.deliveries else None

    @property
    def seconds_per_token(self) -> float | None:
        """Mean over the tokens after the first; None for fewer than two."""
        if len(self.deliveries) < 2 or self.tokens < 2:
            return None
        return (self.deliveries[-1] - self.deliveries[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.deliveries, self.deliveries[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class LatencyBound:
    """What a request must keep to count as good; seconds."""

    first_token: float
    per_token: float

    def kept_by(self, record: RequestRecord) -> bool:
        if record.ending is not Ending.ANSWERED or record.first_token_seconds is None:
            return False
        return record.first_token_seconds <= self.first_token and (record.seconds_per_token or 0.0) <= self.per_token


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times in [0, seconds) of a Poisson process with `rate` arrivals a second, the same for the same seed."""
    if rate <= 0:
        raise ValueError(f"rate is {rate}, must be above 0")
    rng = random.Random(seed)
    times: list[float] = []
    now = rng.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += rng.expovariate(rate)
    return times


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation between the values around it. Raises ValueError for no values."""
    if not values:
        raise ValueError("values is empty, must hold at least one")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarise_load(records: Sequence[RequestRecord], bound: LatencyBound) -> dict[str, Any]:
    """Counts, rates over the time from the first arrival to the last end, and percentiles in seconds.

    `goodput` is requests a second that kept the bound. `client_late_seconds` is by how much the client itself was late
    at worst: where that is not small, the figures are of the client.
    """
    begin = min((record.due for record in records), default=0.0)
    seconds = max((record.ended for record in records), default=0.0) - begin
    answered = [record for record in records if record.ending is Ending.ANSWERED]
    errors = Counter(record.error for record in records if record.ending is Ending.FAILED)
    good = sum(bound.kept_by(record) for record in records)

    def rate(count: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    return {
        "requests": len(records),
        "answered": len(answered),
        "refused": sum(record.ending is Ending.REFUSED for record in records),
        "failed": sum(errors.values()),
        "errors": dict(errors),
        "seconds": seconds,
        "tokens": sum(record.tokens for record in answered),
        "tokens_per_second": rate(sum(record.tokens for record in answered)),
        "requests_per_second": rate(len(answered)),
        "goodput": rate(good),
        "good": good,
        "first_token_seconds": _percentiles([record.first_token_seconds for record in answered]),
        "seconds_per_token": _percentiles([record.seconds_per_token for record in answered]),
        "gap_seconds": _percentiles([gap for record in answered for gap in record.gaps]),
        "client_late_seconds": max((record.sent - record.due for record in records), default=0.0),
    }


def _percentiles(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {f"p{percent}": percentile(known, percent) for percent in PERCENTILES} if known else None
