"""Every live sequence: those that wait and those that run."""

from __future__ import annotations

import heapq

from scheduler.state.workers import Sequence


class WaitingQueue:
    """Sequences in order of arrival. A sequence that ran before gets its old place back."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._members: dict[int, Sequence] = {}
        self.tokens = 0
        """Committed tokens of all waiting sequences."""

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._members

    def members(self) -> list[Sequence]:
        """All waiting sequences, oldest first. Sorts them, so for rare events only."""
        return sorted(self._members.values(), key=lambda sequence: sequence.order)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.order, sequence.sequence_id))
        self._members[sequence.sequence_id] = sequence
        self.tokens += sequence.length

    def oldest(self) -> Sequence | None:
        while self._heap:
            order, sequence_id = self._heap[0]
            sequence = self._members.get(sequence_id)
            if sequence is not None and sequence.order == order:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Takes the sequence out. Its heap entry stays and is skipped later, until there are too many such entries."""
        del self._members[sequence.sequence_id]
        self.tokens -= sequence.length
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(member.order, member.sequence_id) for member in self._members.values()]
            heapq.heapify(self._heap)

    def check_integrity(self) -> None:
        """Raises RuntimeError when the queue's totals are wrong."""
        tokens = sum(sequence.length for sequence in self._members.values())
        if tokens != self.tokens:
            raise RuntimeError(f"the queue counts {self.tokens} tokens and holds {tokens}")
        entries = set(self._heap)
        if any((member.order, member.sequence_id) not in entries for member in self._members.values()):
            raise RuntimeError("a waiting sequence is missing from the queue's heap")


class LiveSet:
    """All live sequences by id; each of them is either `waiting` or `running`."""

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}
        self._arrivals = 0

    def next_order(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every sequence is in exactly one place."""
        self.waiting.check_integrity()
        for sequence_id, sequence in self.sequences.items():
            if sequence.length != len(sequence.tokens):
                raise RuntimeError(f"sequence {sequence_id} has {len(sequence.tokens)} tokens, not {sequence.length}")
            if (sequence_id in self.waiting) == (sequence_id in self.running):
                raise RuntimeError(f"sequence {sequence_id} is not exactly one of waiting and running")
        if len(self.waiting) + len(self.running) != len(self.sequences):
            raise RuntimeError("sequences wait or run that are not in the live set")
