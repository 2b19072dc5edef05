"""Prompt lookup against a search through all places, on histories that grow and are cut back."""

from __future__ import annotations

import random

import pytest

from engine.drafting.ngram_engine import continuation
from engine.drafting.prompt_lookup import TokenPlaces
from engine.settings import EngineSettings


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


def test_ngram_looks_for_endings_of_two_tokens_or_more() -> None:
    rng = random.Random(3)
    for _ in range(500):
        history = [rng.randrange(4) for _ in range(rng.randint(0, 40))]
        count = rng.randint(0, 5)
        assert continuation(history, count) == (searched(history, count, 2, 32) if count else [])


def test_known_places_take_no_search() -> None:
    """Only new tokens are read: a history that may be read from its end on gives the same."""

    class OnlyNew(list[int]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            assert isinstance(index, slice)
            assert index.start == 6
            return super().__getitem__(index)

    places = TokenPlaces()
    places.follow([1, 2, 3, 4, 1, 2])
    places.follow(OnlyNew([1, 2, 3, 4, 1, 2, 3]))
    assert places.continuation(3, 1, 4) == [4, 1, 2]


@pytest.mark.parametrize("lookup_match", [0, -1, 33])
def test_setting_is_checked(lookup_match: int) -> None:
    with pytest.raises(ValueError, match=f"lookup_match is {lookup_match}, must be between 1 and 32"):
        EngineSettings("model", lookup_match=lookup_match)
