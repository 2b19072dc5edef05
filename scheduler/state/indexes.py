"""Indexes of one target's sequences, by age and by length, kept up to date one sequence at a time."""

from __future__ import annotations

from itertools import islice
from typing import Generic, TypeVar

from scheduler.state.sequence_record import SequenceRecord

Member = TypeVar("Member", bound=SequenceRecord)


class DraftedIndex(Generic[Member]):
    """DRAFTED sequences in the order in which they were drafted.

    Sequences of the same length with as many draft tokens are a group: they need neither padding nor realignment in one
    batch. Groups are formed anew at each use, which only one policy makes.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._by_age: dict[int, Member] = {}

    def __len__(self) -> int:
        return len(self._by_age)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._by_age

    def add(self, sequence: Member) -> None:
        self._by_age[sequence.sequence_id] = sequence

    def remove(self, sequence: Member) -> None:
        del self._by_age[sequence.sequence_id]

    def oldest(self) -> Member | None:
        return next(iter(self._by_age.values()), None)

    def first(self, count: int) -> list[Member]:
        """The `count` sequences that were drafted first, in that order."""
        return list(islice(self._by_age.values(), count))

    def largest_group(self) -> list[Member]:
        """Up to `batch_size` members of the largest group, oldest first; of equally large groups, the one with the
        oldest member. A group of more than a batch is no better than a full batch."""
        groups: dict[tuple[int, int], list[Member]] = {}
        for sequence in self._by_age.values():
            groups.setdefault((sequence.length, len(sequence.draft_tokens)), []).append(sequence)
        largest = max(groups.values(), key=lambda group: min(len(group), self._batch_size), default=[])
        return largest[: self._batch_size]


class CountByLength:
    """How many sequences of each length are on their way to being drafted."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0

    def add(self, length: int) -> None:
        self._counts[length] = self._counts.get(length, 0) + 1
        self.total += 1

    def remove(self, length: int) -> None:
        left = self._counts[length] - 1
        if left:
            self._counts[length] = left
        else:
            del self._counts[length]
        self.total -= 1

    def at(self, length: int) -> int:
        return self._counts.get(length, 0)
