"""What a target verifies beyond committed tokens: proposals, whoever makes them.

A proposal is a hint that belongs to a prefix, by its digest (scheduler/state/digests.py). It changes how fast a
sequence goes on, never which tokens it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.drafting.draft_kv import DraftKv
from engine.steps import RowOutcome, VerifyRow
from scheduler.messages import DraftingReport


@dataclass(slots=True, eq=False)
class SequenceDrafting:
    """What a target's worker keeps of a sequence for whoever proposes: the latest proposal of a local proposer, for the
    prefix with this `digest`; the output that is `expected`, from the end of the prompt on; the KV of a draft inside."""

    sequence_id: int
    cache_scope: bytes = b""
    expected: Sequence[int] = ()
    kv: DraftKv = field(default_factory=DraftKv)
    proposal: Sequence[int] = ()
    digest: int = 0

    def keep(self, digest: int, proposal: Sequence[int]) -> None:
        self.digest, self.proposal = digest, proposal

    def kept(self, digest: int, most: int) -> Sequence[int]:
        """Up to `most` tokens after the prefix; empty where none are kept for it."""
        return self.proposal[:most] if digest == self.digest else ()


@dataclass(slots=True)
class Asked:
    """At most `most` tokens are wanted after the prefix with this digest, which has `length` tokens."""

    drafting: SequenceDrafting
    digest: int
    length: int
    most: int


class Proposer(Protocol):
    """Called on the worker's step thread alone: `take` before a step's passes, `after_pass` behind each of them while
    its features last, and `offer` once the step's reply has left."""

    def take(self, asked: Sequence[Asked], wait_seconds: float) -> list[Sequence[int]]:
        """A proposal for each; empty where there is none in time. Only who proposes elsewhere waits, at most so long.
        Every token is below the vocabulary's size."""
        ...

    def after_pass(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome]) -> None:
        """What heads must take in of a pass before the next one."""
        ...

    def offer(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome], digests: Sequence[int]) -> None:
        """What the rows of a step have committed. `digests` are of each row's tokens with what it has sampled. Proposes
        `row.draft_length` tokens for each row that has sampled, or has that begun; never raises, never blocks on others.
        Rows that failed are not among them."""
        ...

    def forget(self, drafting: SequenceDrafting) -> None:
        """The sequence has ended here, or left."""
        ...

    def report(self) -> DraftingReport | None:
        """Since it was asked last; None where no draft worker is asked."""
        ...
