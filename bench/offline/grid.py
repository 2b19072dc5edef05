"""The cells of a benchmark: what is measured, and beside which plain decoding it stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

NGRAM = "ngram"
"""As in deploy/options.py, which needs more than a machine with a GPU may have."""


class System(Enum):
    """Ways of decoding: Spool without and with drafts, and other systems."""

    PLAIN = "plain"
    EQSPEC = "eqspec"
    EXSPEC = "exspec"
    RAGGED = "ragged"
    AUTO = "auto"
    TRANSFORMERS = "transformers"
    ASSISTED = "assisted"
    VLLM = "vllm"
    VLLM_DRAFT = "vllm-draft"
    VLLM_NGRAM = "vllm-ngram"

    @property
    def is_spool(self) -> bool:
        return self not in (System.TRANSFORMERS, System.ASSISTED) and not self.is_vllm

    @property
    def is_vllm(self) -> bool:
        return self in (System.VLLM, System.VLLM_DRAFT, System.VLLM_NGRAM)

    @property
    def drafts(self) -> bool:
        return self not in (System.PLAIN, System.TRANSFORMERS, System.VLLM)

    @property
    def plain(self) -> System:
        """Of the same maker, without a draft."""
        if self.is_spool:
            return System.PLAIN
        return System.VLLM if self.is_vllm else System.TRANSFORMERS


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One cell. `draft` is None and `draft_length` 0 for plain decoding, `exact` None for other systems.

    `category` None takes the prompts of all categories.
    """

    system: System
    batch_size: int
    draft: str | None = None
    draft_length: int = 0
    exact: bool | None = True
    category: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"system": self.system.value}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> GridPoint:
        """Raises KeyError or ValueError for what is none."""
        fields = {name: content[name] for name in cls.__slots__}
        return cls(**fields | {"system": System(fields["system"])})

    @property
    def label(self) -> str:
        """For people."""
        parts = [self.system.value, f"batch {self.batch_size}"]
        if self.draft is not None:
            parts.append(f"{self.draft} x {self.draft_length}")
        if self.exact is False:
            parts.append("not exact")
        if self.category is not None:
            parts.append(self.category)
        return ", ".join(parts)

    @property
    def reference(self) -> GridPoint:
        """The batch-1 plain decoding, by the same maker, whose output this cell's should be."""
        return GridPoint(self.system.plain, 1, exact=self.exact)

    def baseline(self, points: Iterable[GridPoint]) -> GridPoint | None:
        """Spool's plain decoding of the same prompts at the same batch size; with the same exactness if there is."""
        plain = replace(self, system=System.PLAIN, draft=None, draft_length=0)
        present = set(points)
        wanted = (True, False) if self.exact is None else (self.exact,)
        return next((found for exact in wanted if (found := replace(plain, exact=exact)) in present), None)


@dataclass(frozen=True, slots=True)
class Grid:
    """The axes. `model_drafts` are the drafts that are models: the only ones that other systems take."""

    systems: Sequence[System]
    batch_sizes: Sequence[int]
    drafts: Sequence[str]
    model_drafts: Sequence[str]
    draft_lengths: Sequence[int]
    exact: Sequence[bool]
    categories: Sequence[str | None] = (None,)

    def points(self) -> list[GridPoint]:
        """Each once; plain decoding first, so that what is compared with it stands close to it in time."""
        found: dict[GridPoint, None] = {}
        for category in self.categories:
            for batch_size in self.batch_sizes:
                for system in sorted(self.systems, key=lambda system: system is not System.PLAIN):
                    for point in self._variants(system, batch_size):
                        found[replace(point, category=category)] = None
        return list(found)

    def _variants(self, system: System, batch_size: int) -> list[GridPoint]:
        # Transformers' assisted generation takes one prompt at a time.
        if system is System.ASSISTED and batch_size != 1:
            return []
        exactness: Sequence[bool | None] = self.exact if system.is_spool else (None,)
        if not system.drafts:
            return [GridPoint(system, batch_size, exact=exact) for exact in exactness]
        drafts = self.drafts if system.is_spool else self.model_drafts
        if system is System.VLLM_NGRAM:
            drafts = (NGRAM,)
        return [
            GridPoint(system, batch_size, draft, draft_length, exact)
            for exact in exactness
            for draft in drafts
            for draft_length in self.draft_lengths
        ]
