"""What a target verifies beyond committed tokens: proposals, whoever makes them.

A proposal is a hint that belongs to a prefix, by its digest (scheduler/state/digests.py). It changes how fast a
sequence goes on, never which tokens it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.drafting.sequence import SequenceDrafting
from engine.steps import RowOutcome, VerifyRow
from scheduler.messages import DraftingReport


@dataclass(slots=True)
class Asked:
    """At most `most` tokens are wanted after the prefix with this digest, which has `length` tokens."""

    drafting: SequenceDrafting
    digest: int
    length: int
    most: int


class Proposer(Protocol):
    """Called on the worker's step thread alone: `take` before a step's passes, and `offer` once its reply has left."""

    def take(self, asked: Sequence[Asked], wait_seconds: float) -> list[Sequence[int]]:
        """A proposal for each; empty where there is none in time. Only who proposes elsewhere waits, at most so long.
        Every token is below the vocabulary's size."""
        ...

    def offer(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome], digests: Sequence[int]) -> None:
        """What the rows of a step have committed. By now `row.history` ends with the tokens that the row has accepted,
        and `outcome.tokens[-1]`, the sampled one, follows it; without tokens the row has sampled nothing. `digests` are
        of all these. Proposes `row.draft_length` tokens for each row that has sampled, or has that begun; never blocks
        on others, and raises DeviceLostError alone. Rows that failed are not among them."""
        ...

    def forget(self, drafting: SequenceDrafting) -> None:
        """The sequence has ended here, or left."""
        ...

    def report(self) -> DraftingReport | None:
        """Since it was asked last; None where no draft worker is asked."""
        ...
