"""Which sequences of a target are prefilled next: the keys take turns, and those of one key go in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from scheduler.state.key_accounts import KeyAccount
from scheduler.state.sequence_record import SequenceRecord

Member = TypeVar("Member", bound=SequenceRecord)


class PrefillQueue(Generic[Member]):
    """PREFILLING sequences of one target, those of a key in the order in which they came here.

    The key whose last chunk is longest ago is first, so a newcomer does not wait for all the prompts of a key with
    many. Weights do not count here: admission and slots go by them already.
    """

    def __init__(self) -> None:
        self._lines: dict[KeyAccount, dict[int, Member]] = {}
        """None is empty."""
        self._turns: dict[KeyAccount, int] = {}
        """The number of each key's last turn, also of keys that have no sequence here now."""
        self._last_turn = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, sequence_id: int) -> bool:
        return any(sequence_id in line for line in self._lines.values())

    def __iter__(self) -> Iterator[Member]:
        for line in self._lines.values():
            yield from line.values()

    def add(self, sequence: Member) -> None:
        self._lines.setdefault(sequence.account, {})[sequence.sequence_id] = sequence
        self._count += 1

    def remove(self, sequence: Member) -> None:
        line = self._lines[sequence.account]
        del line[sequence.sequence_id]
        self._count -= 1
        if not line:
            del self._lines[sequence.account]

    def in_turns(self) -> Iterator[Member]:
        """The first of each key, then the second of each, and so on."""
        keys = sorted(self._lines, key=lambda account: self._turns.get(account, 0))
        lines = [iter(self._lines[account].values()) for account in keys]
        while lines:
            left = []
            for line in lines:
                sequence = next(line, None)
                if sequence is not None:
                    yield sequence
                    left.append(line)
            lines = left

    def took_turn(self, account: KeyAccount) -> None:
        """A chunk of one of the key's sequences was planned."""
        self._last_turn += 1
        self._turns[account] = self._last_turn

    def check_integrity(self) -> None:
        """Raises RuntimeError where a line is empty, or the lines do not add up."""
        if not all(self._lines.values()) or sum(map(len, self._lines.values())) != self._count:
            raise RuntimeError(f"the prefill queue counts {self._count} sequences, its lines hold others")
