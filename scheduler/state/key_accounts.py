"""What each API key has been served, and what it has in the cell now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from spool.scheduler.key_class import NOBODY, KeyClass

_MAX_IDLE = 256


class KeyAccount:
    """One key. `live_set.LiveSet` counts its `waiting` and `running` sequences.

    `served` is the virtual counter of Sheng et al., "Fairness in Serving Large Language Models" (arXiv 2401.00588): the
    tokens that the key was served, divided by its weight. `claimed` also counts the prompts of running sequences that
    are not computed yet, so that a key is not admitted over and over before the first chunk is back. `refusals` are by
    the name of the limit.

    The tokens that the key may still use in a minute fill at a constant rate and begin full. What a sequence will use
    is known only once it was served, so the level may fall below zero; the debt is paid off before anything new is let
    in, and the mean rate holds.
    """

    def __init__(self, key: KeyClass) -> None:
        self.key = key
        self.served = self.claimed = 0.0
        self.running = self.waiting = self.prompt_tokens = self.output_tokens = 0
        self.refusals: Counter[str] = Counter()
        self._level = float(key.tokens_per_minute or 0)
        self._filled_at: float | None = None

    @property
    def share(self) -> float:
        """Running sequences for the key's weight."""
        return self.running / self.key.weight

    @property
    def may_run_more(self) -> bool:
        return self.key.max_running is None or self.running < self.key.max_running

    def count(self, other: KeyAccount) -> None:
        """Adds what another key has and was served."""
        self.running += other.running
        self.waiting += other.waiting
        self.prompt_tokens += other.prompt_tokens
        self.output_tokens += other.output_tokens
        self.refusals += other.refusals

    def raise_to(self, served: float) -> None:
        """The key was idle, and has no claim to what it was not served meanwhile."""
        missing = max(0.0, served - self.served)
        self.served += missing
        self.claimed += missing

    def claim_prompt(self, tokens: int) -> None:
        """A sequence with `tokens` of prompt to compute was admitted; below 0: it left before they were computed."""
        self.claimed += tokens / self.key.weight

    def serve_prompt(self, tokens: int) -> None:
        """Tokens of a prompt were computed."""
        self.prompt_tokens += tokens
        self.served += tokens / self.key.weight

    def serve_output(self, tokens: int, now: float) -> None:
        """Tokens of output were committed."""
        self.output_tokens += tokens
        share = tokens / self.key.weight
        self.served += share
        self.claimed += share
        if self.key.tokens_per_minute is not None:
            self.debit(tokens, now)

    def debit(self, tokens: int, now: float) -> None:
        """Takes tokens from those of the minute."""
        self.seconds_until_token(now)
        self._level -= tokens

    def seconds_until_token(self, now: float) -> float:
        """Until the key may use at least one token, if nothing is used meanwhile; 0 where it may."""
        most = self.key.tokens_per_minute
        if most is None:
            return 0.0
        rate = most / 60.0
        if self._filled_at is not None and now > self._filled_at:
            self._level = min(float(most), self._level + rate * (now - self._filled_at))
        self._filled_at = now
        return max(0.0, (1.0 - self._level) / rate)


class KeyAccounts:
    """The accounts of all configured keys, and one of weight 1 for each other name that has live sequences.

    Of other names, at most `_MAX_IDLE` accounts without sequences are kept, so that names which clients or gateways
    make up cannot make the tables grow. What dropped accounts were served is counted for `NOBODY`.
    """

    def __init__(self, keys: Iterable[KeyClass]) -> None:
        self._configured = {key.name: KeyAccount(key) for key in keys}
        self._dropped = KeyAccount(NOBODY)
        self._others: dict[str, KeyAccount] = {}

    def __iter__(self) -> Iterator[KeyAccount]:
        return chain(self._others.values(), self._configured.values())

    def of(self, name: str) -> KeyAccount:
        account = self._configured.get(name) or self._others.get(name)
        if account is None:
            if len(self._others) >= 2 * _MAX_IDLE:
                self._drop_idle()
            account = self._others[name] = KeyAccount(NOBODY)
        return account

    def totals(self) -> list[KeyAccount]:
        """For each class, what its keys have and were served; the class of keys that are not configured comes first."""
        total = KeyAccount(NOBODY)
        for one in (self._dropped, *self._others.values()):
            total.count(one)
        return [total, *self._configured.values()]

    def _drop_idle(self) -> None:
        """Forgets the accounts without sequences that were made first, all but `_MAX_IDLE` of them."""
        idle = [name for name, one in self._others.items() if not (one.waiting or one.running)]
        for name in idle[: max(0, len(idle) - _MAX_IDLE)]:
            self._dropped.count(self._others.pop(name))
