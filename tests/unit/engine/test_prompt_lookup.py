"""Prompt lookup against a search through all places, on histories that grow and are cut back."""

from __future__ import annotations

import random

import pytest

from spool.engine.drafting.lookup.prompt_lookup import TokenPlaces
from spool.engine.drafting.lookup.text_store import TextStore
from spool.engine.drafting.proposer import Asked, Lookup
from spool.engine.drafting.sequence import SequenceDrafting
from spool.engine.kv.pages import PageTable
from spool.engine.steps import RowOutcome, VerifyRow
from spool.scheduler.sampling import SamplingParameters


def searched(history: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """The definition: the longest ending first, the latest place first, copied token by token."""
    for length in range(min(longest, len(history) - 1), shortest - 1, -1):
        for start in range(len(history) - length - 1, -1, -1):
            if history[start : start + length] == history[-length:]:
                tokens = list(history)
                for place in range(start + length, start + length + count):
                    tokens.append(tokens[place])
                return tokens[len(history) :]
    return []


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (2, 5), (3, 3), (4, 32), (9, 32)])
@pytest.mark.parametrize("vocabulary", [1, 2, 3, 12])
def test_finds_what_a_search_finds(vocabulary: int, shortest: int, longest: int) -> None:
    rng = random.Random(vocabulary * 100 + shortest)
    history: list[int] = []
    places = TokenPlaces()
    found = 0
    for _ in range(400):
        if rng.random() < 0.2:
            kept = rng.randint(0, len(history))
            del history[kept:]
            places.truncate(kept)
        history += [rng.randrange(vocabulary) for _ in range(rng.randint(0, 9))]
        if history and rng.random() < 0.3:
            start = rng.randrange(len(history))
            history += history[start : start + 12]
        if rng.random() < 0.2:
            continue  # what is new waits for the next time
        places.follow(history)
        count = rng.randint(0, 6)
        expected = searched(history, count, shortest, longest) if count else []
        assert places.continuation(count, shortest, longest) == expected
        assert len(places) == len(history)
        found += bool(expected)
    assert found > 20


def test_what_was_sampled_counts_and_is_replaced_where_another_token_is_committed() -> None:
    """Rows propose after a history and a sampled token; what is committed next may differ, and is sometimes cut."""
    rng = random.Random(4)
    lookup, drafting, history, found = Lookup(2), SequenceDrafting(), [0], 0
    for digest in range(1, 300):
        sampled, count = rng.randrange(3), rng.randrange(5)
        row = VerifyRow(PageTable(), history[-1:], (), True, history, 1, SamplingParameters())
        row.lookup_length, row.drafting = count, drafting
        lookup.offer([row], [RowOutcome([sampled])], [digest])
        (proposal,) = lookup.take([Asked(drafting, digest, count)], 0.0)
        assert list(proposal) == (searched([*history, sampled], count, 2, 32) if count else [])
        assert lookup.take([Asked(drafting, digest + 1, count)], 0.0) == [()]
        found += bool(proposal)
        history.append(rng.choice((sampled, 0)))
        if rng.random() < 0.1:
            kept = rng.randint(1, len(history))
            del history[kept:]
            drafting.truncate(kept)
    assert found > 100


def test_the_longer_match_counts_and_of_equal_ones_that_in_the_sequence() -> None:
    lookup, ending = Lookup(2, TextStore(1 << 20)), list(range(100, 112))

    def proposed(history: list[int], sampled: int, scope: bytes = b"", digest: int = 1) -> list[int]:
        row = VerifyRow(PageTable(), history[-1:], (), True, history, 1, SamplingParameters())
        row.lookup_length, row.drafting = 3, SequenceDrafting(cache_scope=scope)
        lookup.remember([row])
        lookup.offer([row], [RowOutcome([sampled])], [digest])
        (found,) = lookup.take([Asked(row.drafting, digest, 3)], 0.0)
        return list(found)

    assert proposed([1, *ending, 20, 21, 22], 23) == []
    # Elsewhere twelve tokens are alike, here two, seven, and twelve as well.
    assert proposed([2, *ending[-2:], 30, *ending[:-1]], ending[-1]) == [20, 21, 22]
    assert proposed([3, *ending[-7:], 30, *ending[:-1]], ending[-1]) == [20, 21, 22]
    assert proposed([4, *ending, 40, 41, *ending[:-1]], ending[-1]) == [40, 41, *ending[:1]]
    # Fewer than eight are looked for here alone; a text that begins alike is longer than any other match.
    assert proposed([5, *ending[-7:-1]], ending[-1]) == []
    assert proposed([6, *ending[-2:], 30, *ending[-7:-1]], ending[-1]) == [30, *ending[-7:-5]]
    assert proposed([4, *ending, 40, 41, *ending[:2]], ending[2]) == ending[3:6]
    assert proposed([1, *ending, 20, 21], 22) == []
    assert proposed([1, *ending], 20) == [21, 22]
    assert proposed([1, *ending], 20, b"other") == []
