"""Who is admitted next: fair among API keys by the tokens that they were served, by priority and age within a key.

The order among keys is that of the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models",
arXiv 2401.00588, section 4): the key with the smallest counter is next. A key that begins to compete has its counter
raised to that of the key which is next, or where none competes, of the one which did last; so a key saves nothing up
while it asks for less than its share. Unlike in the paper, prompts are computed in chunks, long after admission. So the
order goes by what a key has claimed, and counters are raised to what was served.
"""

from __future__ import annotations

import heapq
import itertools

from scheduler.state.key_accounts import KeyAccount
from scheduler.state.workers import Sequence

_MOST_STALE = 64
"""Entries of a heap that may be out of date beyond as many as are not."""


class _Line:
    """The waiting sequences of one key by priority, then by age. One that ran before gets its old place back."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []
        self._members: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (*sequence.rank, sequence.sequence_id))
        self._members[sequence.sequence_id] = sequence

    def first(self) -> Sequence:
        while True:
            *rank, sequence_id = self._heap[0]
            sequence = self._members.get(sequence_id)
            if sequence is not None and sequence.rank == tuple(rank):
                return sequence
            heapq.heappop(self._heap)

    def remove(self, sequence: Sequence) -> None:
        """The heap's entry stays and is skipped later, until there are too many such entries."""
        del self._members[sequence.sequence_id]
        if len(self._heap) > 2 * len(self._members) + _MOST_STALE:
            self._heap = [(*member.rank, member.sequence_id) for member in self._members.values()]
            heapq.heapify(self._heap)

    def check_integrity(self, key: str) -> None:
        entries = set(self._heap)
        if any((*member.rank, member.sequence_id) not in entries for member in self._members.values()):
            raise RuntimeError(f"a waiting sequence of key {key!r} is missing from its heap")


class WaitingQueue:
    """All but `members` takes amortised logarithmic time in the sequences and keys that wait.

    A key *competes* while sequences of it wait and it may run more. `_competing` has the number of each one's latest
    entry in the heap. Entries hold the claim as it was: one that has grown is noticed when its entry comes first, and
    one that has shrunk gets a new entry (`update`).
    """

    def __init__(self) -> None:
        self._members: dict[int, Sequence] = {}
        self._lines: dict[KeyAccount, _Line] = {}
        self._heap: list[tuple[float, int, KeyAccount]] = []
        self._competing: dict[KeyAccount, int] = {}
        # Downwards: of keys with equal counters, the one that began to compete last has waited least, and is first.
        self._numbers = itertools.count(0, -1)
        self._last: KeyAccount | None = None
        """The key that was the last to compete."""
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
        account = sequence.account
        self._members[sequence.sequence_id] = sequence
        self._lines.setdefault(account, _Line()).push(sequence)
        self.tokens += sequence.length
        account.waiting += 1
        account.waiting_tokens += sequence.length
        self.update(account)

    def first(self) -> Sequence | None:
        """The sequence to admit next; None where no key competes."""
        account = self.first_key()
        return None if account is None else self._lines[account].first()

    def first_key(self) -> KeyAccount | None:
        """The key that is next, which is the one with the smallest claim; None where no key competes."""
        while self._heap:
            claimed, number, account = self._heap[0]
            if self._competing.get(account) != number:
                heapq.heappop(self._heap)
            elif claimed < account.claimed:
                heapq.heapreplace(self._heap, (account.claimed, number, account))
            else:
                return account
        return None

    def remove(self, sequence: Sequence) -> None:
        account = sequence.account
        del self._members[sequence.sequence_id]
        self._lines[account].remove(sequence)
        self.tokens -= sequence.length
        account.waiting -= 1
        account.waiting_tokens -= sequence.length
        self.update(account)

    def update(self, account: KeyAccount, shrunk: bool = False) -> None:
        """To be called when the key runs more or fewer sequences; `shrunk` where its claim is smaller as well."""
        competes = account.waiting > 0 and account.may_run_more
        if competes and account not in self._competing:
            before = self.first_key() or self._last
            if before is not None:
                account.raise_to(before.served)
            self._enter(account, next(self._numbers))
        elif competes and shrunk:
            self._enter(account, next(self._numbers))
        elif not competes and account in self._competing:
            del self._competing[account]
            self._last = account

    def _enter(self, account: KeyAccount, number: int) -> None:
        self._competing[account] = number
        heapq.heappush(self._heap, (account.claimed, number, account))
        if len(self._heap) > 2 * len(self._competing) + _MOST_STALE:
            self._heap = [(account.claimed, number, account) for account, number in self._competing.items()]
            heapq.heapify(self._heap)

    def check_integrity(self) -> None:
        """Raises RuntimeError when totals are wrong, or a sequence or a key would never be found."""
        tokens = sum(sequence.length for sequence in self._members.values())
        if tokens != self.tokens:
            raise RuntimeError(f"the queue counts {self.tokens} tokens and holds {tokens}")
        if sum(account.waiting_tokens for account in self._lines) != tokens:
            raise RuntimeError("the keys' waiting tokens do not add up to the queue's")
        if sum(map(len, self._lines.values())) != len(self._members):
            raise RuntimeError("the lines of the keys do not hold exactly the waiting sequences")
        entries = {number for _, number, _ in self._heap}
        for account, line in self._lines.items():
            name = account.key.name
            line.check_integrity(name)
            if account.waiting != len(line):
                raise RuntimeError(f"key {name!r} counts {account.waiting} waiting sequences, {len(line)} wait")
            if (account in self._competing) != (account.waiting > 0 and account.may_run_more):
                raise RuntimeError(f"key {name!r} competes though it should not, or should and does not")
            if account in self._competing and self._competing[account] not in entries:
                raise RuntimeError(f"key {name!r} is missing from the queue's heap")
