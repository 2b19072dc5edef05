"""What `spool bench offline` measures: systems, batch sizes and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class System(Enum):
    """Spool's policies and other systems."""

    PLAIN = "plain"
    EQSPEC = "eqspec"
    EXSPEC = "exspec"
    RAGGED = "ragged"
    AUTO = "auto"
    TRANSFORMERS = "transformers"
    VLLM = "vllm"
    VLLM_DRAFT = "vllm-draft"
    VLLM_NGRAM = "vllm-ngram"

    @property
    def plain(self) -> System:
        """Plain decoding by the same software."""
        if self is System.TRANSFORMERS:
            return self
        return System.VLLM if self in (System.VLLM, System.VLLM_DRAFT, System.VLLM_NGRAM) else System.PLAIN

    @property
    def is_spool(self) -> bool:
        return self.plain is System.PLAIN

    @property
    def drafts(self) -> bool:
        return self is not self.plain


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One cell of the grid. `draft` is None and `draft_length` 0 for plain decoding."""

    system: System
    batch_size: int
    draft: str | None = None
    draft_length: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"system": self.system.value}

    def __str__(self) -> str:
        draft = "" if self.draft is None else f", {self.draft} x {self.draft_length}"
        return f"{self.system.value}, batch {self.batch_size}{draft}"

    @property
    def reference(self) -> GridPoint:
        """Plain decoding at batch 1 by the same software; its output is what this cell's output should be."""
        return GridPoint(self.system.plain, 1)

    @property
    def baseline(self) -> GridPoint:
        """Spool's plain decoding at the same batch size, with which the speed is compared."""
        return GridPoint(System.PLAIN, self.batch_size)


def grid_points(
    systems: Sequence[System], batch_sizes: Sequence[int], draft: str, draft_lengths: Sequence[int]
) -> list[GridPoint]:
    """Every combination once; references first, then by batch size, plain decoding first.

    Of other systems, one uses prompt lookup and the others use a draft that is a model.
    """
    points = []
    for batch_size in batch_sizes:
        for system in sorted(systems, key=lambda system: system is not System.PLAIN):
            if not system.drafts:
                points.append(GridPoint(system, batch_size))
            elif system is not System.VLLM_DRAFT or draft != "ngram":
                used = "ngram" if system is System.VLLM_NGRAM else draft
                points += [GridPoint(system, batch_size, used, length) for length in draft_lengths]
    return sorted(dict.fromkeys(points), key=lambda point: point != point.reference)
