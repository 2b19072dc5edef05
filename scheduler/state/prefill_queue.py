"""Which sequences of a target are prefilled next: the keys share by tokens, and those of one key go in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

from scheduler.state.key_accounts import KeyAccount
from scheduler.state.sequence_record import SequenceRecord

Member = TypeVar("Member", bound=SequenceRecord)


class PrefillQueue(Generic[Member]):
    """PREFILLING sequences of one target, those of a key in the order in which they came here.

    The key that was fed fewest tokens for its weight is first: start-time fair queueing (Goyal et al., SIGCOMM 1996). A
    key with nothing to prefill here saves up what others are fed meanwhile, but no more than `savings` tokens. So a
    prompt of a key that asks seldom is fed without a break, and one of any length delays those of other keys by no more
    than that.
    """

    def __init__(self, savings: int) -> None:
        self._savings = savings
        self._lines: dict[KeyAccount, dict[int, Member]] = {}
        """None is empty."""
        self._fed: dict[KeyAccount, float] = {}
        """Tokens over weight of each key, also of keys that have no sequence here now."""
        self._clock = 0.0
        """The largest count that a key had when it was fed."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, sequence_id: int) -> bool:
        return any(sequence_id in line for line in self._lines.values())

    def __iter__(self) -> Iterator[Member]:
        for line in self._lines.values():
            yield from line.values()

    def add(self, sequence: Member) -> None:
        account = sequence.account
        if account not in self._lines:
            self._lines[account] = {}
            least = self._clock - self._savings / account.key.weight
            self._fed[account] = max(self._fed.get(account, least), least)
        self._lines[account][sequence.sequence_id] = sequence
        self._count += 1

    def remove(self, sequence: Member) -> None:
        line = self._lines[sequence.account]
        del line[sequence.sequence_id]
        self._count -= 1
        if not line:
            del self._lines[sequence.account]

    def in_turns(self, most: int) -> Iterator[Member]:
        """The sequences in the order in which to feed them, up to `most` of each key.

        Call `count` for each that is fed before the next is asked for. Sequences may leave meanwhile: some that have
        left may still come up.
        """
        heap = [
            (self._fed[account], place, account, iter(list(islice(line.values(), most))))
            for place, (account, line) in enumerate(self._lines.items())
        ]
        heapq.heapify(heap)
        while heap:
            _, place, account, members = heap[0]
            sequence = next(members, None)
            if sequence is None:
                heapq.heappop(heap)
                continue
            yield sequence
            heapq.heapreplace(heap, (self._fed[account], place, account, members))

    def count(self, account: KeyAccount, tokens: int) -> None:
        """So many tokens of a sequence of this key are fed."""
        before = self._fed.get(account, self._clock)
        self._clock = max(self._clock, before)
        self._fed[account] = before + tokens / account.key.weight

    def check_integrity(self) -> None:
        """Raises RuntimeError where a line is empty, or the lines do not add up."""
        if not all(self._lines.values()) or sum(map(len, self._lines.values())) != self._count:
            raise RuntimeError(f"the prefill queue counts {self._count} sequences, its lines hold others")
