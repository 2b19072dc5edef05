"""The sequences of one target that wait to be verified, by age and by length, kept up to date one at a time."""

from __future__ import annotations

from itertools import islice

from scheduler.sequence import Sequence

GroupKey = tuple[int, int]


def group_key(sequence: Sequence) -> GroupKey:
    """Rows with the same key need neither padding nor realignment in one batch."""
    return sequence.length, len(sequence.draft_tokens)


class DraftedIndex:
    """DRAFTED sequences in the order in which they were drafted, and in groups of equal length.

    Groups are filed by size, up to `batch_size`: a larger one is no better than a full batch.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._by_age: dict[int, Sequence] = {}
        self._groups: dict[GroupKey, dict[int, Sequence]] = {}
        self._by_size: list[dict[GroupKey, None]] = [{} for _ in range(batch_size + 1)]
        self._added = 0

    def __len__(self) -> int:
        return len(self._by_age)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._by_age

    def add(self, sequence: Sequence) -> None:
        self._added += 1
        sequence.drafted_order = self._added
        self._by_age[sequence.sequence_id] = sequence
        key = sequence.length, len(sequence.draft_tokens)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = {}
        group[sequence.sequence_id] = sequence
        size = len(group)
        if size <= self._batch_size:
            if size > 1:
                del self._by_size[size - 1][key]
            self._by_size[size][key] = None

    def remove(self, sequence: Sequence) -> None:
        del self._by_age[sequence.sequence_id]
        key = sequence.length, len(sequence.draft_tokens)
        group = self._groups[key]
        del group[sequence.sequence_id]
        size = len(group)
        if size < self._batch_size:
            del self._by_size[size + 1][key]
            if size:
                self._by_size[size][key] = None
            else:
                del self._groups[key]

    def oldest(self) -> Sequence | None:
        return next(iter(self._by_age.values()), None)

    def first(self, count: int) -> list[Sequence]:
        """The `count` that were drafted first, in that order."""
        return list(islice(self._by_age.values(), count))

    def largest_group(self) -> list[Sequence]:
        """The largest equal-length group, oldest first, at most `batch_size` of it; the oldest member breaks ties."""
        for size in range(self._batch_size, 0, -1):
            keys = self._by_size[size]
            if keys:
                groups = self._groups
                oldest = min(keys, key=lambda key: next(iter(groups[key].values())).drafted_order)
                return list(islice(groups[oldest].values(), self._batch_size))
        return []

    def check_integrity(self) -> None:
        """Raises RuntimeError when the two views differ."""
        grouped = {member for group in self._groups.values() for member in group}
        if grouped != set(self._by_age) or sum(map(len, self._groups.values())) != len(self._by_age):
            raise RuntimeError("drafted sequences by age and by length differ")
        for key, group in self._groups.items():
            if any(group_key(sequence) != key for sequence in group.values()):
                raise RuntimeError(f"a sequence changed its length while drafted, in group {key}")
            if key not in self._by_size[min(len(group), self._batch_size)]:
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
