"""What a target verifies beyond committed tokens: proposals, whoever makes them.

A proposal is a hint that belongs to a prefix, by its digest (scheduler/state/digests.py). It changes how fast a
sequence goes on, never which tokens it gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from spool.engine.drafting.lookup.text_store import TextStore
from spool.engine.drafting.sequence import SequenceDrafting
from spool.engine.settings import LONGEST_LOOKUP_MATCH
from spool.engine.steps import RowOutcome, VerifyRow
from spool.scheduler.messages import DraftingReport, ProposalSource


@dataclass(slots=True)
class Asked:
    """At most `most` tokens are wanted after the prefix with this digest."""

    drafting: SequenceDrafting
    digest: int
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
        of all these. Proposes `row.draft_length` tokens for each row that has sampled, `row.lookup_length` where they
        need no draft, or has that begun; never blocks on others, and raises DeviceLostError alone. Rows that failed are
        not among them. Without rows, draft workers only hear what was forgotten."""
        ...

    def forget(self, drafting: SequenceDrafting) -> None:
        """The sequence has ended here, or left."""
        ...

    def report(self) -> DraftingReport | None:
        """Since it was asked last; None where no draft worker is asked."""
        ...


class LocalProposer(ABC):
    """Of a `Proposer`, what all have in common that compute in the target's process: `offer` keeps what it proposes,
    and `take` finds it."""

    @abstractmethod
    def offer(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome], digests: Sequence[int]) -> None:
        """As `Proposer.offer`."""

    def take(self, asked: Sequence[Asked], wait_seconds: float) -> list[Sequence[int]]:
        return [one.drafting.kept(one.digest, one.most) for one in asked]

    def forget(self, drafting: SequenceDrafting) -> None:
        drafting.keep(0, ())

    def report(self) -> DraftingReport | None:
        return None


class Lookup(LocalProposer):
    """Prompt lookup. Needs no model, and works with any vocabulary; a row without a match gets no proposal.

    With a `store`, it looks in earlier texts, too: the longer match counts, and of equal ones that in the sequence.
    """

    def __init__(self, shortest_match: int, store: TextStore | None = None) -> None:
        self._shortest = shortest_match
        self._store = store

    @property
    def remembers(self) -> bool:
        """Whether `remember` wants the rows of every step."""
        return self._store is not None

    def remember(self, rows: Sequence[VerifyRow]) -> None:
        """Keeps what the rows of a step have committed, for other sequences of their scopes."""
        if self._store is not None:
            self._store.enter([(row.drafting.cache_scope, row.drafting.text, row.history) for row in rows])

    def offer(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome], digests: Sequence[int]) -> None:
        for row, outcome, digest in zip(rows, outcomes, digests, strict=True):
            if row.lookup_length and outcome.tokens:
                places = row.drafting.places
                places.follow(row.history)
                places.extend(outcome.tokens[-1:])
                elsewhere, alike = self._elsewhere(row, outcome.tokens[-1])
                own = places.continuation(row.lookup_length, max(self._shortest, alike), LONGEST_LOOKUP_MATCH)
                # Only what is committed stays: the sampled token is committed once a row feeds it.
                places.truncate(len(row.history))
                row.drafting.keep(digest, own or elsewhere, ProposalSource.LOOKUP)

    def _elsewhere(self, row: VerifyRow, sampled: int) -> tuple[Sequence[int], int]:
        """What followed in an earlier text, and how long the match is."""
        tree = None if self._store is None else self._store.tree(row.drafting.cache_scope)
        if tree is None:
            return (), 0
        return tree.continuation(row.drafting.text, row.history, sampled, row.lookup_length, self._shortest)


class Proposers:
    """A target's: output that is expected goes before prompt lookup, and this before a draft of any kind.

    A sequence with an expected output gets nothing else. One that lookup has found something for is not offered to the
    draft, whose KV of it lags until it is asked again.
    """

    def __init__(self, lookup: Lookup | None = None, draft: Proposer | None = None) -> None:
        self._lookup = lookup
        self._draft = draft

    @property
    def remembers(self) -> bool:
        """Whether `offer` is to have all rows that computed, also those for which nothing is proposed."""
        return self._lookup is not None and self._lookup.remembers

    def take(self, asked: Sequence[Asked], wait_seconds: float) -> list[Sequence[int]]:
        found: list[Sequence[int]] = [one.drafting.kept(one.digest, one.most) for one in asked]
        if self._draft is not None:
            missing = [place for place, one in enumerate(asked) if not found[place] and not one.drafting.expected]
            taken = self._draft.take([asked[place] for place in missing], wait_seconds) if missing else []
            for place, proposal in zip(missing, taken, strict=True):
                found[place] = proposal
                asked[place].drafting.source = ProposalSource.DRAFT
        return found

    def offer(self, rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome], digests: Sequence[int]) -> None:
        if self._lookup is not None:
            self._lookup.remember(rows)
        left: list[int] = []
        for place, (row, outcome, digest) in enumerate(zip(rows, outcomes, digests, strict=True)):
            if not row.draft_length and not row.lookup_length:
                continue
            expected, grammar = row.drafting.expected, row.sampling.grammar
            if grammar is not None and outcome.tokens and outcome.tokens[-1] in grammar.end_token_ids:
                continue
            if not expected:
                left.append(place)
            elif outcome.tokens:
                first = len(row.history) + 1 - row.prompt_length
                row.drafting.keep(digest, expected[first : first + row.lookup_length], ProposalSource.EXPECTED)
        if self._lookup is not None and left:
            self._lookup.offer(*_at(left, rows, outcomes, digests))
            left = [place for place in left if not rows[place].drafting.kept(digests[place], 1)]
        if self._draft is not None and (left or not any(row.draft_length or row.lookup_length for row in rows)):
            self._draft.offer(*_at(left, rows, outcomes, digests))

    def forget(self, drafting: SequenceDrafting) -> None:
        if self._draft is not None:
            self._draft.forget(drafting)

    def report(self) -> DraftingReport | None:
        return None if self._draft is None else self._draft.report()


def _at(
    places: Sequence[int], rows: Sequence[VerifyRow], outcomes: Sequence[RowOutcome], digests: Sequence[int]
) -> tuple[list[VerifyRow], list[RowOutcome], list[int]]:
    return [rows[at] for at in places], [outcomes[at] for at in places], [digests[at] for at in places]
