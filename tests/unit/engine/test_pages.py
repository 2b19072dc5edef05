"""Page pool, forks and prefix cache against a plain model that knows what is written where."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv.paged_kv import PagedKv
from engine.kv.pages import OutOfPagesError, PageKey, PagePool, PageTable
from engine.kv.prefix_cache import PrefixCache

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
SCOPES = (b"", b"s" * 32)


@dataclass
class Held:
    tokens: list[int] = field(default_factory=list)
    table: PageTable = field(default_factory=PageTable)
    keys: list[PageKey] = field(default_factory=lambda: [SCOPES[0]])


class SharedPages(RuleBasedStateMachine):
    """Sequences of two scopes over two tokens, so that they begin alike often. The model: the token last written to
    each place of each page, which page is known for which tokens of which scope, and in which order the
    free ones were dropped."""

    @initialize(total=st.integers(1, 8), page_size=st.integers(1, 3))
    def start(self, total: int, page_size: int) -> None:
        self.pool = PagePool(total, page_size)
        self.cache = PrefixCache(self.pool)
        self.size = page_size
        self.memory = [[-1] * page_size for _ in range(total)]
        self.known: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.dropped = list(range(total - 1, -1, -1))
        self.held: list[Held] = []

    def holders(self, page: int) -> int:
        return sum(page in held.table.pages for held in self.held)

    def lose_name(self, page: int) -> None:
        self.known = {tokens: known for tokens, known in self.known.items() if known != page}

    def expect_handed_out(self) -> int:
        """A page that nobody could find, the last dropped; else of the known ones the one dropped first."""
        named = set(self.known.values())
        nameless = [page for page in self.dropped if page not in named]
        return nameless[-1] if nameless else self.dropped[0]

    def feed(self, held: Held, tokens: list[int]) -> None:
        place, before = held.table.length, list(held.table.pages)
        fits = (place + len(tokens) - 1) // self.size + 1 - len(before) <= len(self.dropped)
        assert self.pool.can_append(held.table, len(tokens)) == fits
        try:
            self.pool.append(held.table, len(tokens))
        except OutOfPagesError:
            assert not fits
            assert (held.table.pages, held.table.length) == (before, place)
            return
        assert fits
        for page in held.table.pages[len(before) :]:
            assert page == self.expect_handed_out()
            self.dropped.remove(page)
            self.lose_name(page)
        for position, token in enumerate(tokens, place):
            self.memory[held.table.pages[position // self.size]][position % self.size] = token
        held.tokens += tokens

    def cut(self, held: Held, length: int) -> None:
        """To `length`, or to the border before where it lies inside a page that another one shares."""
        asked = length
        if length % self.size and self.holders(held.table.pages[length // self.size]) > 1:
            length -= length % self.size
        pages = held.table.pages[-(-length // self.size) :]
        assert self.pool.truncate(held.table, asked) == length
        del held.tokens[length:], held.keys[length // self.size + 1 :]
        if length % self.size:
            self.lose_name(held.table.pages[-1])
        self.dropped += [page for page in reversed(pages) if not self.holders(page)]

    def a_sequence(self, which: int) -> Held:
        return self.held[which % len(self.held)]

    @rule(tokens=TOKENS, leave=st.integers(0, 2), settles=st.booleans(), scope=st.sampled_from(SCOPES))
    def open(self, tokens: list[int], leave: int, settles: bool, scope: bytes) -> None:
        """Takes over what is known, then feeds the rest."""
        held = Held(keys=[scope])
        limit = max(0, len(tokens) - leave)
        expected: list[int] = []
        while (len(expected) + 1) * self.size <= limit:
            page = self.known.get((scope, tuple(tokens[: (len(expected) + 1) * self.size])))
            if page is None:
                break
            expected.append(page)
        self.held.append(held)
        assert self.cache.share(held.table, held.keys, tokens, limit) == len(expected) * self.size
        assert held.table.pages == expected
        self.dropped = [page for page in self.dropped if page not in expected]
        held.tokens = tokens[: held.table.length]
        if rest := tokens[held.table.length :]:
            self.feed(held, rest)
        if settles:
            self.register(held, held.table.length)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9), tokens=TOKENS, committed=st.integers(0, 9))
    def go_on(self, which: int, tokens: list[int], committed: int) -> None:
        held = self.a_sequence(which)
        page = held.table.pages[-1] if held.table.length % self.size else None
        assert page is None or self.holders(page) == 1
        self.feed(held, tokens)
        self.register(held, min(held.table.length, committed))

    def register(self, held: Held, length: int) -> None:
        scope, first = held.keys[0], len(held.keys) - 1
        self.cache.register(held.table, held.keys, held.tokens, length)
        for place in range(first, length // self.size):
            tokens, page = tuple(held.tokens[: (place + 1) * self.size]), held.table.pages[place]
            if page not in self.known.values():
                self.known.setdefault((scope, tokens), page)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9), length=st.integers(0, 9))
    def truncate(self, which: int, length: int) -> None:
        held = self.a_sequence(which)
        self.cut(held, min(length, held.table.length))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9), length=st.integers(0, 9))
    def fork(self, which: int, length: int) -> None:
        """Whole pages are shared; a part of one is copied to a page of the fork's own."""
        held = self.a_sequence(which)
        whole, rest = divmod(min(length, held.table.length), self.size)
        if rest and not self.dropped:
            with pytest.raises(OutOfPagesError, match="1 more pages needed, 0 of"):
                self.pool.fork(held.table, whole * self.size + rest)
            return
        own = self.expect_handed_out() if rest else None
        table, copies = self.pool.fork(held.table, whole * self.size + rest)
        if own is None:
            assert not copies
        else:
            assert copies == [(held.table.pages[whole], own)]
            self.dropped.remove(own)
            self.lose_name(own)
            self.memory[own] = list(self.memory[held.table.pages[whole]])
        self.held.append(Held(held.tokens[: table.length], table, held.keys[: whole + 1]))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def forget(self, which: int) -> None:
        held = self.a_sequence(which)
        self.cache.forget(held.table)
        for page in held.table.pages:
            self.lose_name(page)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        held = self.a_sequence(which)
        self.cut(held, 0)
        self.held.remove(held)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for held in self.held:
            read = [token for page in held.table.pages for token in self.memory[page]]
            assert read[: held.table.length] == held.tokens

    @invariant()
    def what_is_known_is_there(self) -> None:
        for (scope, tokens), page in self.known.items():
            assert tuple(self.memory[page]) == tokens[-self.size :]
            found = Held(keys=[scope])
            shared = self.cache.share(found.table, found.keys, tokens, len(tokens))
            # A page whose front is gone waits for it to be computed again.
            assert found.table.pages == [
                self.known[scope, tokens[: (place + 1) * self.size]] for place in range(shared // self.size)
            ]
            whole = all((scope, tokens[:end]) in self.known for end in range(self.size, len(tokens), self.size))
            assert (shared == len(tokens)) == whole
            was_free = [page for page in reversed(found.table.pages) if page in self.dropped]
            self.pool.free(found.table)
            # Looking has made the free ones among them the last dropped.
            self.dropped = [page for page in self.dropped if page not in was_free] + was_free

    @invariant()
    def pages_are_conserved(self) -> None:
        self.pool.check_conservation([held.table for held in self.held])
        assert self.pool.free_pages == len(self.dropped)
        assert sorted(self.dropped) == [p for p in range(self.pool.total_pages) if not self.holders(p)]


TestSharedPages = SharedPages.TestCase
TestSharedPages.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_pages_are_known_in_their_own_scope_alone() -> None:
    pool = PagePool(4, 2)
    cache = PrefixCache(pool)
    held = Held([1, 2, 3, 4], keys=[SCOPES[1]])
    pool.append(held.table, 4)
    cache.register(held.table, held.keys, held.tokens, 4)
    for scope, shared in ((b"", 0), (bytes(32), 0), (held.keys[1], 0), (SCOPES[1], 4)):
        assert cache.share(PageTable(), [scope], held.tokens, 4) == shared, scope


@pytest.mark.parametrize("copies", [[], [(0, 3)], [(1, 4), (1, 2), (0, 3)]])
def test_pages_are_copied_whole(copies: list[tuple[int, int]]) -> None:
    kv = PagedKv(3, 5, 4, 2, 8, torch.bfloat16, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for layer in kv.layers:
        layer.pool.copy_(torch.randn(layer.pool.shape, generator=generator))
    expected = [kv.read_page(page) for page in range(6)]
    for source, destination in copies:
        expected[destination] = expected[source]
    kv.copy_pages(copies)
    assert all(torch.equal(kv.read_page(page), expected[page]) for page in range(6))
