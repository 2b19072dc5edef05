"""What one API key may have of a cell: its weight in the sharing, and its limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MIN_WEIGHT = 0.001
MAX_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True)
class KeyClass:
    """A key's part of the service. Without a limit (None) only those of the scheduler count.

    Of keys that compete, each is served tokens in proportion to its `weight`. At most `max_running` sequences of the
    key run at a time, and its others wait; beyond `max_waiting` waiting ones, and while the key has used more than
    `tokens_per_minute`, further submissions are refused.

    Raises `ValueError` naming field, key, value and limit.
    """

    name: str
    weight: float = 1.0
    max_running: int | None = None
    max_waiting: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            limit = f"between {MIN_WEIGHT:g} and {MAX_WEIGHT:g}"
            raise ValueError(f"weight of key {self.name!r} is {self.weight!r}, must be {limit}")
        for field in ("max_running", "max_waiting", "tokens_per_minute"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} of key {self.name!r} is {value!r}, must be None or at least 1")

    def part_of(self, cells: int) -> KeyClass:
        """The key's class in each of several cells: an equal part of each limit, rounded up."""

        def part(limit: int | None) -> int | None:
            return None if limit is None else math.ceil(limit / cells)

        return replace(
            self,
            max_running=part(self.max_running),
            max_waiting=part(self.max_waiting),
            tokens_per_minute=part(self.tokens_per_minute),
        )


NOBODY = KeyClass("")
"""The class of every key that is not configured, as of those without a name, and of requests without a key."""
