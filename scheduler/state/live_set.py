"""Every live sequence: those that wait and those that run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler.key_class import KeyClass
from scheduler.state.key_accounts import KeyAccounts
from scheduler.state.waiting_queue import WaitingQueue
from scheduler.state.workers import Sequence


class LiveSet:
    """All live sequences by id; each of them is either `waiting` or `running`, and counted so for its key."""

    def __init__(self, keys: Iterable[KeyClass] = ()) -> None:
        self.accounts = KeyAccounts(keys)
        self.sequences: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}
        self._arrivals = 0

    def next_order(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def start(self, sequence: Sequence) -> None:
        """A waiting sequence runs from now on."""
        account = sequence.account
        self.waiting.remove(sequence)
        self.running[sequence.sequence_id] = sequence
        account.running += 1
        account.claim_prompt(sequence.prompt_left)
        self.waiting.update(account)

    def stop(self, sequence: Sequence) -> None:
        """A running sequence runs no more."""
        account = sequence.account
        del self.running[sequence.sequence_id]
        account.running -= 1
        account.claim_prompt(-sequence.prompt_left)
        self.waiting.update(account)

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
        running = Counter(sequence.account.key.name for sequence in self.running.values())
        for account in self.accounts:
            name = account.key.name
            if account.running != running[name]:
                raise RuntimeError(f"key {name!r} counts {account.running} running sequences, {running[name]} run")
