"""Measurements of a benchmark, and what they say together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.offline.grid import GridPoint


@dataclass(frozen=True, slots=True)
class Measurement:
    """One cell, measured once. Times are seconds.

    `exact_match` is the share of outputs that equal those of batch-1 plain decoding by the same maker, `different`
    names the prompts of the others. `statistics` are those of services/scheduler/telemetry/statistics.py, `categories`
    those of bench/offline/rounds.py; other systems have neither. `commit` is Spool's.
    """

    point: GridPoint
    repeat: int
    tokens: int
    seconds: float
    exact_match: float
    different: list[int]
    commit: str
    statistics: dict[str, Any] = field(default_factory=dict)
    hidden_draft_share: float | None = None
    categories: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        speed = f"{self.tokens_per_second:.1f} tokens/s, same output {self.exact_match:.1%}"
        return f"{self.point.label}, repeat {self.repeat + 1}: {speed}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"point": self.point.to_json(), "tokens_per_second": self.tokens_per_second}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Measurement:
        """Raises KeyError or ValueError for what is none."""
        fields = {name: content[name] for name in cls.__slots__}
        return cls(**fields | {"point": GridPoint.from_json(fields["point"])})


@dataclass(frozen=True, slots=True)
class Spread:
    """Of several measurements of one thing."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError for no values."""
        if not values:
            raise ValueError("values is empty, must hold at least one")
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class CellSummary:
    """One cell over its repeats. `typical` is the measurement in the middle: shares and histograms are its own.

    `ratio_to_plain` compares with plain decoding at the same batch size, repeat by repeat, so that what slows the
    machine down for a while slows both; None where plain decoding was not measured.
    """

    point: GridPoint
    repeats: int
    tokens_per_second: Spread
    ratio_to_plain: Spread | None
    exact_match: float
    typical: Measurement

    def to_json(self) -> dict[str, Any]:
        typical = self.typical.to_json()
        return {
            "point": self.point.to_json(),
            "repeats": self.repeats,
            "tokens_per_second": asdict(self.tokens_per_second),
            "ratio_to_plain": asdict(self.ratio_to_plain) if self.ratio_to_plain is not None else None,
            "exact_match": self.exact_match,
        } | {name: typical[name] for name in ("statistics", "hidden_draft_share", "categories")}


def summarise(measurements: Sequence[Measurement]) -> list[CellSummary]:
    """One summary a cell, in the order in which they first come."""
    cells: dict[GridPoint, dict[int, Measurement]] = {}
    for measurement in measurements:
        cells.setdefault(measurement.point, {})[measurement.repeat] = measurement
    summaries = []
    for point, found in cells.items():
        plain = point.baseline(cells)
        ratios = [
            measurement.tokens_per_second / cells[plain][repeat].tokens_per_second
            for repeat, measurement in found.items()
            if plain is not None and repeat in cells[plain] and cells[plain][repeat].tokens
        ]
        ordered = sorted(found.values(), key=lambda measurement: measurement.tokens_per_second)
        summaries.append(
            CellSummary(
                point=point,
                repeats=len(found),
                tokens_per_second=Spread.of([measurement.tokens_per_second for measurement in ordered]),
                ratio_to_plain=Spread.of(ratios) if ratios else None,
                exact_match=min(measurement.exact_match for measurement in ordered),
                typical=ordered[(len(ordered) - 1) // 2],
            )
        )
    return summaries
