"""The sequences of one target that wait to be verified, by age and by length, kept up to date one at a time."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from scheduler.sequence import Sequence

_ADDITIONS_BETWEEN_USES = 64
"""Keeping groups up to date for longer than that costs more than making them anew."""

GroupKey = tuple[int, int]


def group_key(sequence: Sequence) -> GroupKey:
    """Rows with the same key need neither padding nor realignment in one batch."""
    return sequence.length, len(sequence.draft_tokens)


class DraftedIndex:
    """DRAFTED sequences in the order in which they were drafted.

    Groups of equal length are kept while somebody asks for them: most policies never do, or seldom. No group counts for
    more than `batch_size`: a larger one is no better than a full batch.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._by_age: dict[int, Sequence] = {}
        self._groups: _EqualLengthGroups | None = None
        self._groups_kept_until = 0
        self._added = 0

    def __len__(self) -> int:
        return len(self._by_age)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._by_age

    def add(self, sequence: Sequence) -> None:
        self._added += 1
        sequence.drafted_order = self._added
        self._by_age[sequence.sequence_id] = sequence
        if self._groups is not None:
            if self._added > self._groups_kept_until:
                self._groups = None
            else:
                self._groups.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        del self._by_age[sequence.sequence_id]
        if self._groups is not None:
            self._groups.remove(sequence)

    def oldest(self) -> Sequence | None:
        return next(iter(self._by_age.values()), None)

    def first(self, count: int) -> list[Sequence]:
        """The `count` that were drafted first, in that order."""
        return list(islice(self._by_age.values(), count))

    def largest_group(self) -> list[Sequence]:
        """The largest equal-length group, oldest first, at most `batch_size` of it; the oldest member breaks ties."""
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


class _EqualLengthGroups:
    """Sequences by length, in groups that are filed by size, up to `most` members."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._groups: dict[GroupKey, dict[int, Sequence]] = {}
        self._by_size: list[dict[GroupKey, None]] = [{} for _ in range(most + 1)]

    def add(self, sequence: Sequence) -> None:
        key = group_key(sequence)
        group = self._groups.setdefault(key, {})
        group[sequence.sequence_id] = sequence
        size = len(group)
        if size <= self._most:
            if size > 1:
                del self._by_size[size - 1][key]
            self._by_size[size][key] = None

    def remove(self, sequence: Sequence) -> None:
        key = group_key(sequence)
        group = self._groups[key]
        del group[sequence.sequence_id]
        size = len(group)
        if size < self._most:
            del self._by_size[size + 1][key]
            if size:
                self._by_size[size][key] = None
            else:
                del self._groups[key]

    def largest(self) -> list[Sequence]:
        """At most `most` of the largest group, oldest first; the oldest member breaks ties."""
        for size in range(self._most, 0, -1):
            keys = self._by_size[size]
            if keys:
                groups = self._groups
                oldest = min(keys, key=lambda key: next(iter(groups[key].values())).drafted_order)
                return list(islice(groups[oldest].values(), self._most))
        return []

    def check_integrity(self, by_age: Collection[int]) -> None:
        """Raises RuntimeError when the groups do not hold just these sequences, or are filed wrongly."""
        grouped = {member for group in self._groups.values() for member in group}
        if grouped != set(by_age) or sum(map(len, self._groups.values())) != len(by_age):
            raise RuntimeError("drafted sequences by age and by length differ")
        for key, group in self._groups.items():
            if any(group_key(sequence) != key for sequence in group.values()):
                raise RuntimeError(f"a sequence changed its length while drafted, in group {key}")
            if key not in self._by_size[min(len(group), self._most)]:
                raise RuntimeError(f"group {key} is filed under a wrong size")
        if sum(map(len, self._by_size)) != len(self._groups):
            raise RuntimeError("a group is filed twice")


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
