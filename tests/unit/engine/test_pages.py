"""Pages and the prefix cache against a plain model that knows what is written where: what windows left is free,
what is seen is there, and nothing of another scope."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spool.engine.kv.groups import PageGroup, lanes_of, page_groups
from spool.engine.kv.paged_kv import PagedKv
from spool.engine.kv.pages import OutOfPagesError, PageKey, PagePool, PageTable
from spool.engine.kv.prefix_cache import PrefixCache
from spool.scheduler.page_counts import PageCounts

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
SCOPES = (b"", b"s" * 32)
LAYERS = ([None], [None, 3], [None, 5, 5, 5], [4, 4], [None, None, 2], [None, 2, 2, 7, 7, 7, 7])
MOST_AHEAD = 12


@dataclass
class Held:
    tokens: list[int] = field(default_factory=list)
    table: PageTable = field(default_factory=PageTable)
    keys: list[PageKey] = field(default_factory=lambda: [b""])
    committed: int = 0


class Pages(RuleBasedStateMachine):
    """Sequences of two scopes over two tokens, so that they begin alike often. The KV of a position is its scope and
    all tokens up to it: the model knows what lies where in the memory of each page, whichever group it serves."""

    @initialize(windows=st.sampled_from(LAYERS), total=st.integers(4, 24), page_size=st.integers(1, 3))
    def start(self, windows: list[int | None], total: int, page_size: int) -> None:
        self.groups = page_groups(windows)
        self.pool = PagePool(total, page_size, self.groups)
        self.cache = PrefixCache(self.pool)
        self.spans = [group.slices * page_size for group in self.groups]
        self.counts = PageCounts(tuple(self.spans), tuple(group.window or 0 for group in self.groups), MOST_AHEAD)
        self.memory: list[dict[int, tuple[object, ...]]] = [{} for _ in range(total)]
        self.held: list[Held] = []

    def feed(self, held: Held, tokens: list[int]) -> None:
        first = held.table.length
        ends = [*(run.end for run in held.table.runs), *(0 for _ in self.groups)]
        needed = [-(-(first + len(tokens)) // span) - end for span, end in zip(self.spans, ends, strict=False)]
        fits = sum(max(0, count) for count in needed) <= self.pool.free_pages
        assert self.pool.can_append(held.table, len(tokens)) == fits
        before = list(held.table.pages)
        try:
            self.pool.append(held.table, len(tokens))
        except OutOfPagesError:
            assert not fits
            assert (held.table.pages, held.table.length) == (before, first)
            return
        assert fits
        held.tokens += tokens
        for span, run in zip(self.spans, held.table.runs, strict=True):
            for place in range(first, first + len(tokens)):
                page = run.pages[place // span - run.freed]
                self.memory[page][place % span] = self.content(held, place)

    @staticmethod
    def content(held: Held, place: int) -> tuple[object, ...]:
        return held.keys[0], *held.tokens[: place + 1]

    def settle(self, held: Held, rejected: int) -> None:
        """As a worker does after a step."""
        self.pool.truncate(held.table, held.table.length - rejected)
        del held.tokens[held.table.length :], held.keys[held.table.length // self.pool.page_size + 1 :]
        self.commit(held)

    def commit(self, held: Held) -> None:
        held.committed = held.table.length
        self.cache.register(held.table, held.keys, held.tokens, held.committed)
        self.pool.trim(held.table, held.committed)

    def a_sequence(self, which: int) -> Held:
        return self.held[which % len(self.held)]

    @rule(tokens=TOKENS, more=TOKENS, leave=st.integers(0, 2), scope=st.sampled_from(SCOPES))
    def open(self, tokens: list[int], more: list[int], leave: int, scope: bytes) -> None:
        """Takes over what is known, then feeds the rest."""
        held, known = Held(keys=[scope]), [*tokens, *more]
        self.held.append(held)
        shared = self.cache.share(held.table, held.keys, known, max(0, len(known) - leave))
        assert shared == held.table.length <= max(0, len(known) - leave)
        held.tokens = known[:shared]
        held.committed = shared
        if rest := known[shared : shared + MOST_AHEAD]:
            self.feed(held, rest)
        self.settle(held, 0)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9), tokens=TOKENS, rejected=st.integers(0, 12))
    def go_on(self, which: int, tokens: list[int], rejected: int) -> None:
        held = self.a_sequence(which)
        before = held.table.length
        self.feed(held, tokens)
        self.settle(held, min(rejected, held.table.length - before))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9), length=st.integers(0, 40))
    def go_back(self, which: int, length: int) -> None:
        """Further than a worker has to: either all that is seen from there is kept, or nothing."""
        held = self.a_sequence(which)
        length = min(length, held.table.length)
        self.settle(held, held.table.length - length)
        ends = {length, length - length % self.pool.border}
        assert held.table.length in (ends | {0} if any(group.window for group in self.groups) else ends)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9), length=st.integers(0, 40), tokens=TOKENS)
    def fork(self, which: int, length: int, tokens: list[int]) -> None:
        """Another sequence begins like one that is there, on the same pages."""
        held = self.a_sequence(which)
        length = min(length, held.table.length)
        table, border = self.pool.fork(held.table, length), length - length % self.pool.border
        assert table.length in ({border, 0} if any(group.window for group in self.groups) else {border})
        keys = held.keys[: table.length // self.pool.page_size + 1]
        fork = Held(held.tokens[: table.length], table, keys, min(held.committed, table.length))
        self.held.append(fork)
        self.feed(fork, tokens)
        self.commit(fork)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def forget(self, which: int) -> None:
        """Nobody finds the sequence's pages any more."""
        held, found = self.a_sequence(which), PageTable()
        self.cache.forget(held.table)
        self.cache.share(found, held.keys[:1], held.tokens, held.table.length)
        assert not {*found.pages} & {*held.table.pages}
        self.pool.free(found)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def move(self, which: int) -> None:
        """A sequence's pages become those of another table, page by page."""
        held, moved = self.a_sequence(which), PageTable()
        try:
            self.pool.take(moved, held.table.length)
        except OutOfPagesError:
            assert not moved.pages
            return
        assert [run.freed for run in moved.runs] == [run.freed for run in held.table.runs]
        for source, page in zip(held.table.pages, moved.pages, strict=True):
            self.memory[page] = dict(self.memory[source])
        self.pool.free(held.table)
        held.table, held.keys = moved, held.keys[:1]
        self.commit(held)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        self.pool.free(self.held.pop(which % len(self.held)).table)

    @invariant()
    def what_is_seen_is_there(self) -> None:
        for held in self.held:
            assert len(held.tokens) == held.table.length
            for group, span, run in zip(self.groups, self.spans, held.table.runs, strict=False):
                seen = 0 if group.window is None else max(0, held.committed - group.window + 1)
                for place in range(seen, held.table.length):
                    page = run.pages[place // span - run.freed]
                    assert self.memory[page][place % span] == self.content(held, place)

    @invariant()
    def no_more_pages_are_held_than_counted(self) -> None:
        for held in self.held:
            assert len(held.table.pages) <= self.counts.pages_for(held.table.length)
            for group, span, run in zip(self.groups, self.spans, held.table.runs, strict=False):
                if group.window is not None:
                    assert len(run.pages) <= (group.window - 2) // span + 2

    @invariant()
    def pages_are_conserved(self) -> None:
        self.pool.check_conservation([held.table for held in self.held])


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_pages_are_known_in_their_own_scope_alone() -> None:
    pool = PagePool(4, 2)
    cache = PrefixCache(pool)
    held = Held([1, 2, 3, 4], keys=[SCOPES[1]])
    pool.append(held.table, 4)
    cache.register(held.table, held.keys, held.tokens, 4)
    for scope, shared in ((b"", 0), (bytes(32), 0), (held.keys[1], 0), (SCOPES[1], 4)):
        assert cache.share(PageTable(), [scope], held.tokens, 4) == shared, scope


# Of five pages, a sequence that left first had two, and another one.
@pytest.mark.parametrize(("taken", "first", "second"), [(2, 4, 2), (3, 2, 2), (4, 0, 2), (5, 0, 0)])
def test_what_was_used_last_is_known_longest(taken: int, first: int, second: int) -> None:
    """Pages that nobody could find are handed out before, and the end of a prefix before its front."""
    pool = PagePool(5, 2)
    cache, sequences = PrefixCache(pool), (Held([1, 2, 3, 4]), Held([5, 6]))
    for held in sequences:
        pool.append(held.table, len(held.tokens))
        cache.register(held.table, held.keys, held.tokens, len(held.tokens))
    for held in sequences:
        pool.free(held.table)
    pool.append(PageTable(), 2 * taken)
    found = [cache.share(PageTable(), [b""], held.tokens, len(held.tokens)) for held in sequences]
    assert found == [first, second]


def cached(windows: list[int | None], total: int, length: int) -> tuple[PagePool, PrefixCache, list[int]]:
    """Pages of 2 positions, and the tokens of a sequence of that length that was computed four at a time, and left."""
    pool = PagePool(total, 2, page_groups(windows))
    cache, tokens, held = PrefixCache(pool), list(range(length)), Held()
    while held.table.length < length:
        pool.append(held.table, min(4, length - held.table.length))
        cache.register(held.table, held.keys, tokens, held.table.length)
        pool.trim(held.table, held.table.length)
    pool.free(held.table)
    return pool, cache, tokens


# Of 20 positions, full layers have 10 pages and a window of 4 sees the last 2: the window's others are free, and found
# as long as nobody has got them.
@pytest.mark.parametrize(
    ("total", "shared"),
    [(20, 20), (14, 20)],
)
def test_a_prefix_is_found_where_its_window_is(total: int, shared: int) -> None:
    _, cache, tokens = cached([None, 4], total, 20)
    table = PageTable()
    assert cache.share(table, [b""], [*tokens, 1], 20) == shared
    assert [run.freed for run in table.runs] == [0, 8]


@pytest.mark.parametrize(("total", "shared"), [(20, 12), (14, 0)])
def test_a_shorter_prefix_needs_the_window_at_its_end(total: int, shared: int) -> None:
    """Where other pages were handed out meanwhile, all of the full layers' pages are of no use."""
    _, cache, tokens = cached([None, 4], total, 20)
    assert cache.share(PageTable(), [b""], tokens[:13], 12) == shared


def test_layers_share_the_memory_of_a_page() -> None:
    """Of five layers with windows and one without, a page holds five times as many positions of the one."""
    groups = page_groups([4, 4, None, 4, 4, 4])
    assert groups == (PageGroup((2,), 5), PageGroup((0, 1, 3, 4, 5), 1, 4))
    assert lanes_of(groups, 6) == 5
    kv = PagedKv(6, 3, 16, 2, 8, torch.float32, torch.device("cpu"), groups=groups)
    whole = torch.arange(4 * 5 * 2 * 2 * 16 * 8, dtype=torch.float32).view(4, 5, 2, 2, 16, 8)
    kv.write_pages([2, 0, 1], whole[[2, 0, 1]])
    places = list(kv.places(0, [2, 0]))
    assert torch.equal(kv.layers[2].pool[:, places], torch.cat((whole[2], whole[0])).transpose(0, 1))
    for lane, layer in enumerate((0, 1, 3, 4, 5)):
        assert torch.equal(kv.layers[layer].pool[:, [2, 0]], whole[[2, 0], lane].transpose(0, 1))
    kv.scrub(0, places[3:], 9)
    whole[2, 3, :, :, 9:] = whole[2, 4] = whole[0] = 0
    assert torch.equal(kv.read_pages([1, 2, 0]), whole[[1, 2, 0]])


@pytest.mark.parametrize(("windows", "spans"), [([None] * 4 + [9] * 22, (6, 1)), ([None] * 9 + [9] * 3, (1, 3))])
def test_little_of_a_page_is_left_empty(windows: list[int | None], spans: tuple[int, ...]) -> None:
    groups = page_groups(windows)
    assert tuple(group.slices for group in groups) == spans
    assert all(len(group.layers) * group.slices > 0.9 * lanes_of(groups, len(windows)) for group in groups)


@pytest.mark.parametrize(("pages", "longest"), [(1, 0), (2, 16), (7, 80), (16, 400), (17, 480), (1000, 1000)])
def test_the_longest_sequence_of_so_many_pages(pages: int, longest: int) -> None:
    """Pages of 16 positions of layers with a window of 64, and of 80 of the others; steps of up to 96 tokens. A window
    has 10 + 1 pages at most; full layers take one for each five of its."""
    counts = PageCounts((80, 16), (0, 64), 96)
    assert counts.longest(pages, 1000) == longest
    assert longest in (0, 1000) or counts.pages_for(longest) <= pages < counts.pages_for(longest + 1)
