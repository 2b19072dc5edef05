"""How long the workers of a benchmark take for a step, without a model: the times of a GPU, or any other ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.messages import Role


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a target's step, by itself and for each packed row; and of a draft's pass, in the same way.

    The defaults are those of an 8B target and a small draft on an H100.
    """

    target_step: float = 0.005
    target_row: float = 0.00002
    draft_pass: float = 0.001
    draft_row: float = 0.0

    def seconds(self, role: Role, rows: Iterable[tuple[int, int]]) -> float:
        """Of a step whose rows have so many tokens to feed, and propose so many."""
        pairs = list(rows)
        if not pairs:
            return 0.0
        packed = sum(tokens for tokens, _ in pairs)
        if role is Role.TARGET:
            return self.target_step + self.target_row * packed
        passes = max(1, *(proposed for _, proposed in pairs))
        return self.draft_pass * passes + self.draft_row * packed
