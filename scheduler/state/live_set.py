"""Every live sequence, and who is admitted next: fair among API keys by the tokens that they were served.

The order among keys is that of the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models",
arXiv 2401.00588, section 4): the key with the smallest counter is next. The counter of a key that begins to compete is
raised to that of the key that is next or, where no key competes, of the key that competed last; so a key saves nothing
up while it asks for less than its share. Unlike in the paper, prompts are computed in chunks, long after admission. So
the order goes by what a key has claimed, and counters are raised to what was served.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from itertools import count
from operator import attrgetter

from spool.scheduler.key_class import KeyClass
from spool.scheduler.state.key_accounts import KeyAccount, KeyAccounts
from spool.scheduler.state.workers import Sequence

_rank = attrgetter("rank")


class WaitingQueue:
    """The waiting sequences. A key *competes* while sequences of it wait and it may run more.

    The waiting sequences of a key are sorted by rank, so a sequence that ran before gets its old place back.
    """

    def __init__(self) -> None:
        self._length = 0
        self._by_key: dict[KeyAccount, list[Sequence]] = {}
        self._competing: dict[KeyAccount, None] = {}
        self._last: KeyAccount | None = None
        """The key that was the last to compete."""
        self.tokens = 0
        """Committed tokens of all waiting sequences."""

    def __len__(self) -> int:
        return self._length

    def part_of(self, total: int, account: KeyAccount) -> int:
        """An equal part of a total for each key with waiting sequences, the account's counted in; at least 1."""
        return max(1, total // len(self._by_key.keys() | {account}))

    def tokens_of(self, account: KeyAccount) -> int:
        """Committed tokens of the key's waiting sequences."""
        return sum(sequence.length for sequence in self._by_key.get(account, ()))

    def push(self, sequence: Sequence) -> None:
        account = sequence.account
        self._length += 1
        insort(self._by_key.setdefault(account, []), sequence, key=_rank)
        self.tokens += sequence.length
        account.waiting += 1
        self.update(account)

    def remove(self, sequence: Sequence) -> None:
        account = sequence.account
        self._length -= 1
        line = self._by_key[account]
        del line[bisect_left(line, sequence.rank, key=_rank)]
        if not line:
            del self._by_key[account]
        self.tokens -= sequence.length
        account.waiting -= 1
        self.update(account)

    def first(self, passed_over: Collection[Sequence] = ()) -> Sequence | None:
        """The sequence to admit next, of those not `passed_over`; None where no key competes with any."""
        if not passed_over:
            account = self._first_key()
            return None if account is None else self._by_key[account][0]
        accounts = [*reversed(self._competing)]
        accounts.sort(key=lambda account: account.claimed)
        for account in accounts:
            for sequence in self._by_key[account]:
                if sequence not in passed_over:
                    return sequence
        return None

    def _first_key(self) -> KeyAccount | None:
        """The competing key with the smallest claim; of equal claims, the key that began to compete last."""
        return min(reversed(self._competing), key=lambda account: account.claimed, default=None)

    def update(self, account: KeyAccount) -> None:
        """To be called when the key has more or fewer waiting or running sequences."""
        competes = account.waiting > 0 and account.may_run_more
        if competes and account not in self._competing:
            before = self._first_key() or self._last
            if before is not None:
                account.raise_to(before.served)
            self._competing[account] = None
        elif not competes and account in self._competing:
            del self._competing[account]
            self._last = account


class LiveSet:
    """All live sequences by id; each of them is either `waiting` or `running`, and counted so for its key."""

    def __init__(self, keys: Iterable[KeyClass] = ()) -> None:
        self.accounts = KeyAccounts(keys)
        self.sequences: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}
        self.orders = count(1)
        """For sequences that arrive."""

    def start(self, sequence: Sequence) -> None:
        """A waiting sequence runs from now on."""
        self.waiting.remove(sequence)
        self.running[sequence.sequence_id] = sequence
        self._count_running(sequence, 1)

    def stop(self, sequence: Sequence) -> None:
        """A running sequence runs no more."""
        del self.running[sequence.sequence_id]
        self._count_running(sequence, -1)

    def _count_running(self, sequence: Sequence, by: int) -> None:
        account = sequence.account
        account.running += by
        account.claim_prompt(by * sequence.prompt_left)
        self.waiting.update(account)
