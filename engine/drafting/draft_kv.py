"""What a draft model has of one sequence of a target. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spool.engine.drafting.lookup.prompt_lookup import TokenPlaces
from spool.engine.kv.pages import PageKey, PagePool, PageTable
from spool.engine.kv.prefix_cache import PrefixCache
from spool.engine.sampling.grammars import GrammarState


@dataclass(slots=True, eq=False)
class DraftKv:
    """`known` are the sequence's tokens when the draft last looked, of which the first `agreed` are still the target's.
    `fed` are those whose KV `table` holds: known ones, and behind them what was proposed.

    `keys` as in engine/kv/prefix_cache.py. A sequence that is `given_up` gets no proposals any more.
    """

    keys: list[PageKey] = field(default_factory=lambda: [b""])
    known: list[int] = field(default_factory=list)
    agreed: int = 0
    fed: list[int] = field(default_factory=list)
    table: PageTable = field(default_factory=PageTable)
    places: TokenPlaces = field(default_factory=TokenPlaces)
    grammar_state: GrammarState = field(default_factory=GrammarState)
    given_up: bool = False
    pool: PagePool | None = None
    """The draft's, once it has pages for the sequence."""

    def meet(self, history: Sequence[int], sampled: Sequence[int]) -> int:
        """Takes in the sequence's tokens: the target's history, and what it has sampled behind it, the last of which is
        not in its history yet. Gives how many of `fed` they begin with."""
        known, fed, before = self.known, self.fed, min(self.agreed, len(history))
        same, end = before, min(len(known), len(history))
        while same < end and known[same] == history[same]:
            same += 1
        self.places.truncate(same)
        known[same:] = [*history[same:], *sampled]
        self.agreed = max(len(known) - 1, 0)
        end = min(len(fed), len(known))
        valid = min(before, end)
        while valid < end and fed[valid] == known[valid]:
            valid += 1
        return valid

    def begin(self, pool: PagePool, length: int, prefixes: PrefixCache | None) -> Sequence[int]:
        """Leaves KV of the first `length` tokens, or of fewer where others share the page, and takes over pages known
        by the tokens that follow. Gives the known tokens without KV."""
        self.pool = pool
        kept = pool.truncate(self.table, length)
        del self.fed[kept:], self.keys[kept // pool.page_size + 1 :]
        if prefixes is not None:
            prefixes.share(self.table, self.keys, self.known, len(self.known) - 1)
            self.fed += self.known[kept : self.table.length]
        return self.known[self.table.length :]

    def end(self, pool: PagePool, tokens: Sequence[int], prefixes: PrefixCache | None, settled: int) -> None:
        """The table has KV of `tokens` as well. Lets others find the pages that the first `settled` tokens fill, which
        no verdict takes back.

        Raises RuntimeError where the table says otherwise.
        """
        self.fed += tokens
        if len(self.fed) != self.table.length:
            raise RuntimeError(f"the draft left KV for {self.table.length} positions, must be {len(self.fed)}")
        settled = min(len(self.fed), settled)
        if prefixes is not None:
            prefixes.register(self.table, self.keys, self.fed, settled)
        pool.trim(self.table, settled)

    def fork(self, pool: PagePool, length: int) -> DraftKv:
        """KV for another continuation of the first `length` tokens, on the pages that those fill: of as many of them as
        have KV here, up to a border of the pool."""
        table = pool.fork(self.table, min(length, self.agreed, self.table.length))
        fed = self.fed[: table.length]
        return DraftKv(self.keys[: table.length // pool.page_size + 1], [*fed], len(fed), fed, table, pool=pool)

    def truncate(self, length: int) -> None:
        """The target's history changes from `length` on."""
        self.agreed = min(self.agreed, length)

    def drop(self) -> None:
        """Frees the pages; the next row feeds everything again."""
        if self.pool is not None:
            self.pool.free(self.table)
            del self.fed[:], self.keys[1:]
