"""Indexes of one target's sequences, by age and by length, kept up to date one sequence at a time."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Generic, TypeVar

from scheduler.state.sequence_record import SequenceRecord

_ADDITIONS_BETWEEN_USES = 64
"""Without a use after so many additions, groups are dropped: making them anew is cheaper then."""

GroupKey = tuple[int, int]
Member = TypeVar("Member", bound=SequenceRecord)


def group_key(sequence: SequenceRecord) -> GroupKey:
    """Sequences with the same key need neither padding nor realignment in one batch."""
    return sequence.length, len(sequence.draft_tokens)


class DraftedIndex(Generic[Member]):
    """DRAFTED sequences in the order in which they were drafted.

    Groups of equal length are kept only while a policy uses them; most policies never do, or seldom. A group larger
    than `batch_size` counts as one of `batch_size`: it is no better than a full batch.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._by_age: dict[int, Member] = {}
        self._groups: _EqualLengthGroups[Member] | None = None
        self._groups_kept_until = 0
        self._added = 0

    def __len__(self) -> int:
        return len(self._by_age)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._by_age

    def add(self, sequence: Member) -> None:
        self._added += 1
        sequence.drafted_order = self._added
        self._by_age[sequence.sequence_id] = sequence
        if self._groups is not None:
            if self._added > self._groups_kept_until:
                self._groups = None
            else:
                self._groups.add(sequence)

    def remove(self, sequence: Member) -> None:
        del self._by_age[sequence.sequence_id]
        if self._groups is not None:
            self._groups.remove(sequence)

    def oldest(self) -> Member | None:
        return next(iter(self._by_age.values()), None)

    def first(self, count: int) -> list[Member]:
        """The `count` sequences that were drafted first, in that order."""
        return list(islice(self._by_age.values(), count))

    def largest_group(self) -> list[Member]:
        """Up to `batch_size` members of the largest equal-length group, oldest first.

        Of equally large groups, the one with the oldest member.
        """
        self._groups_kept_until = self._added + _ADDITIONS_BETWEEN_USES
        if self._groups is None:
            self._groups = _EqualLengthGroups(self._batch_size)
            for sequence in self._by_age.values():
                self._groups.add(sequence)
        return self._groups.largest()

    def check_integrity(self) -> None:
        """Raises RuntimeError when the two views differ."""
        if self._groups is not None:
            self._groups.check_integrity(self._by_age)


class _EqualLengthGroups(Generic[Member]):
    """Groups of sequences of equal length, indexed by size. Sizes above `limit` count as `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._groups: dict[GroupKey, dict[int, Member]] = {}
        self._by_size: list[dict[GroupKey, None]] = [{} for _ in range(limit + 1)]

    def add(self, sequence: Member) -> None:
        key = group_key(sequence)
        group = self._groups.setdefault(key, {})
        group[sequence.sequence_id] = sequence
        size = len(group)
        if size <= self._limit:
            if size > 1:
                del self._by_size[size - 1][key]
            self._by_size[size][key] = None

    def remove(self, sequence: Member) -> None:
        key = group_key(sequence)
        group = self._groups[key]
        del group[sequence.sequence_id]
        size = len(group)
        if size < self._limit:
            del self._by_size[size + 1][key]
            if size:
                self._by_size[size][key] = None
            else:
                del self._groups[key]

    def largest(self) -> list[Member]:
        """Up to `limit` members of the largest group, oldest first. Of equal groups, the one with the oldest member."""
        for size in range(self._limit, 0, -1):
            keys = self._by_size[size]
            if keys:
                groups = self._groups
                oldest = min(keys, key=lambda key: next(iter(groups[key].values())).drafted_order)
                return list(islice(groups[oldest].values(), self._limit))
        return []

    def check_integrity(self, by_age: Collection[int]) -> None:
        """Raises RuntimeError when the groups do not hold exactly these sequences, or their sizes are wrong."""
        grouped = {member for group in self._groups.values() for member in group}
        if grouped != set(by_age) or sum(map(len, self._groups.values())) != len(by_age):
            raise RuntimeError("drafted sequences by age and by length differ")
        for key, group in self._groups.items():
            if any(group_key(sequence) != key for sequence in group.values()):
                raise RuntimeError(f"a sequence changed its length while drafted, in group {key}")
            if key not in self._by_size[min(len(group), self._limit)]:
                raise RuntimeError(f"group {key} is indexed under a wrong size")
        if sum(map(len, self._by_size)) != len(self._groups):
            raise RuntimeError("a group is indexed twice")


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
