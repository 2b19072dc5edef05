"""What each API key has been served, and what it has in the cell now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from scheduler.key_class import NOBODY, KeyClass
from scheduler.state.token_bucket import TokenBucket


class KeyAccount:
    """One key. `live_set.LiveSet` counts its `waiting` and `running` sequences.

    `served` is the virtual counter of Sheng et al., "Fairness in Serving Large Language Models" (arXiv 2401.00588): the
    tokens that the key was served, divided by its weight. `claimed` also counts the prompts of running sequences that
    are not computed yet, so that a key is not admitted over and over before the first chunk is back.
    """

    __slots__ = (
        "bucket",
        "claimed",
        "key",
        "output_tokens",
        "prompt_tokens",
        "refusals",
        "running",
        "served",
        "waiting",
    )

    def __init__(self, key: KeyClass) -> None:
        self.key = key
        self.served = 0.0
        self.claimed = 0.0
        self.running = 0
        self.waiting = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.refusals: Counter[str] = Counter()
        """By the name of the limit."""
        self.bucket = None if key.tokens_per_minute is None else TokenBucket(key.tokens_per_minute)

    @property
    def may_run_more(self) -> bool:
        return self.key.max_running is None or self.running < self.key.max_running

    def raise_to(self, served: float) -> None:
        """The key was idle, and has no claim to what it was not served meanwhile."""
        missing = max(0.0, served - self.served)
        self.served += missing
        self.claimed += missing

    def claim_prompt(self, tokens: int) -> None:
        """A sequence was admitted, with so many tokens of prompt to compute; fewer than 0: it has left before that."""
        self.claimed += tokens / self.key.weight

    def serve_prompt(self, tokens: int) -> None:
        """So many tokens of a prompt were computed."""
        self.prompt_tokens += tokens
        self.served += tokens / self.key.weight

    def serve_output(self, tokens: int, now: float) -> None:
        """So many tokens of output were committed."""
        self.output_tokens += tokens
        share = tokens / self.key.weight
        self.served += share
        self.claimed += share
        if self.bucket is not None:
            self.bucket.debit(tokens, now)


class KeyAccounts:
    """The accounts of all configured keys, and one for everybody else: names nobody configured have none of their own,
    so that what clients or gateways make up cannot make the tables grow."""

    def __init__(self, keys: Iterable[KeyClass]) -> None:
        self._nobody = KeyAccount(NOBODY)
        self._accounts = {key.name: KeyAccount(key) for key in keys}

    def __iter__(self) -> Iterator[KeyAccount]:
        yield self._nobody
        yield from self._accounts.values()

    def of(self, name: str) -> KeyAccount:
        return self._accounts.get(name, self._nobody)
