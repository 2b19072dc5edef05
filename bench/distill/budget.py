"""How long a stage may take: minutes of work, or a count of what it makes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """Either `minutes` or `count` (shards, steps). Raises `ValueError` naming field, value and limit."""

    minutes: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.count is None):
            raise ValueError(f"minutes is {self.minutes} and count is {self.count}, exactly one must be given")
        for name, value in (("minutes", self.minutes), ("count", self.count)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, must be above 0")

    def spent(self, seconds: float, count: int) -> float:
        """The part that is spent after so many seconds of work and so many things made, in [0, 1]."""
        part = count / self.count if self.count is not None else seconds / (60 * (self.minutes or 1))
        return min(part, 1.0)
