"""What is found in other texts, against a dictionary of all continuations, and what it takes."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from spool.engine.drafting.lookup.text_store import (
    ENDING,
    LONGEST_ENDING,
    MOST_SCOPES,
    REST_STEPS,
    TextPlace,
    TextStore,
    TextTree,
)

LARGE = 1 << 22
"""So many slots that a few texts never share one of the table."""


class Dictionary:
    """The definition: of each beginning of a text the token that followed it last, and of each ending the beginning
    that ended so and went on last."""

    def __init__(self) -> None:
        self.followed: dict[tuple[int, ...], int] = {}
        self.ended: dict[tuple[int, ...], tuple[int, ...]] = {}

    def enter(self, text: list[int], first: int) -> None:
        for at in range(first, len(text)):
            self.followed[tuple(text[:at])] = text[at]
            if at >= ENDING:
                self.ended[tuple(text[at - ENDING : at])] = tuple(text[:at])

    def continuation(self, text: list[int], most: int, shortest: int) -> tuple[list[int], int]:
        if len(text) >= shortest and tuple(text) in self.followed:
            return self._after(tuple(text), most), len(text)
        beginning = self.ended.get(tuple(text[-ENDING:]))
        if beginning is None:
            return [], 0
        pairs = zip(reversed(beginning), reversed(text), strict=False)
        unlike = [at for at, (one, other) in enumerate(pairs) if one != other]
        alike = min([*unlike, len(beginning), len(text), LONGEST_ENDING])
        return (self._after(beginning, most), alike) if alike >= max(shortest, ENDING) else ([], 0)

    def _after(self, beginning: tuple[int, ...], most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most and (*beginning, *found) in self.followed:
            found.append(self.followed[(*beginning, *found)])
        return found


def enter(tree: TextTree, text: list[int]) -> TextPlace:
    place = TextPlace()
    while tree.lag(place, text):
        tree.follow(place, text, 4096)
    return place


def proposed(tree: TextTree, text: list[int], most: int = 1000) -> tuple[list[int], int]:
    """After a text, of which the last token is sampled and the others enter, like those of a sequence."""
    return tree.continuation(enter(tree, text[:-1]), text[:-1], text[-1], most, 1)


@pytest.mark.parametrize(("vocabulary", "shortest"), [(2, 1), (3, 4), (3, 12), (40, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_finds_what_a_dictionary_of_all_continuations_has(vocabulary: int, shortest: int, seed: int) -> None:
    """Sequences grow together, a few tokens at a time; they repeat parts of others, are cut back, and come again."""
    rng = random.Random(f"{vocabulary} {shortest} {seed}")
    tree, expected, whole, ending = TextTree(LARGE), Dictionary(), 0, 0
    texts = [([rng.randrange(vocabulary)], TextPlace()) for _ in range(6)]
    for _ in range(400):
        at = rng.randrange(len(texts))
        text, place = texts[at]
        if rng.random() < 0.05:
            texts[at] = ([*rng.choice(texts)[0][: rng.randint(1, 20)]], TextPlace())
            continue
        if rng.random() < 0.05:
            kept = rng.randint(1, len(text))
            del text[kept:]
            place.truncate(kept)
        entered = 0 if place.tree == 0 else place.length
        tree.follow(place, text, 1000)
        expected.enter(text, entered)
        assert tree.lag(place, text) == 0
        most, sampled = rng.randint(1, 6), rng.randrange(vocabulary)
        likely, _ = expected.continuation(text, 1, 1)
        if likely and rng.random() < 0.5:
            (sampled,) = likely
        found = tree.continuation(place, text, sampled, most, shortest)
        assert found == expected.continuation([*text, sampled], most, shortest)
        whole += found[1] == len(text) + 1
        ending += 0 < found[1] <= len(text)
        if rng.random() < 0.3:
            source = rng.choice(texts)[0]
            first = rng.randrange(len(source))
            text += source[first : first + 20]
        text += rng.choices(range(vocabulary), k=rng.randint(0, 4))
    assert whole > 4
    assert ending > 4


@pytest.mark.parametrize("numbers", [400, 1 << 32])
def test_what_is_found_once_a_ring_has_gone_round_was_a_text(numbers: int) -> None:
    """Also where the numbers of nodes start again."""
    rng, tree, found_whole, found_ending = random.Random(1), TextTree(128, numbers), 0, 0
    texts: list[list[int]] = [[0] * 30]
    running = [([token], TextPlace()) for token in range(4)]
    for _ in range(6000):
        at = rng.randrange(4)
        text, place = running[at]
        text.append(rng.choice((text[-1], (text[-1] + 1) % 5, rng.randrange(5))))
        tree.follow(place, text, 3)
        sampled = rng.choice(texts[-3:])[min(len(text), 29)]
        proposal, alike = tree.continuation(place, text, sampled, 5, 1)
        known = [*text, sampled]
        if alike == len(known):
            found_whole += 1
            wanted = [*known, *proposal]
            assert any(one[: len(wanted)] == wanted for one in (*texts, *(one for one, _ in running)))
        elif proposal:
            found_ending += 1
            wanted = [*known[-alike:], *proposal]
            every = (*texts, *(one for one, _ in running))
            assert any(one[i : i + len(wanted)] == wanted for one in every for i in range(len(one)))
        if len(text) > 30:
            texts.append(text)
            running[at] = (rng.choice(texts[-3:])[: rng.randint(1, 15)], TextPlace())
    assert found_whole > 20
    assert found_ending > 20


def test_the_same_prompt_is_answered_from_the_first_token_on() -> None:
    """Although the texts end alike before the output, and others came between; after the latest of several answers."""
    rng, tree = random.Random(2), TextTree(1 << 16)
    instruction = rng.choices(range(1000), k=50)
    texts = [[1, *rng.choices(range(1000), k=20), *instruction, *rng.choices(range(1000), k=60)] for _ in range(100)]
    for text in texts:
        enter(tree, text)
    for text in texts:
        for known in (72, 73, 100):
            assert proposed(tree, text[:known]) == (text[known:], known)
    other = [*texts[7][:90], *rng.choices(range(1000), k=40)]
    enter(tree, other)
    assert proposed(tree, other[:80]) == (other[80:], 80)
    assert proposed(tree, texts[7][:95]) == (texts[7][95:], 95)
    # A text that begins otherwise is found by its ending.
    assert proposed(tree, [3, *texts[9][5:20]]) == (texts[9][20:], 15)


def test_what_was_used_least_recently_goes_first_and_what_comes_again_takes_nothing() -> None:
    rng, tree = random.Random(3), TextTree(1000)
    hot, *cold = ([token, *rng.choices(range(1000), k=99)] for token in range(41))
    for number, text in enumerate(cold):
        enter(tree, text)
        for _ in range(100):
            enter(tree, hot)
        assert proposed(tree, hot[:2]) == (hot[2:], 2)
        # Half of the memory is for what was used last.
        for recent in cold[max(0, number - 2) : number + 1]:
            assert proposed(tree, recent[:2]) == (recent[2:], 2)
        assert number < 10 or proposed(tree, cold[number - 10][:20]) == ([], 0)


def test_sequences_that_lag_share_what_enters_in_a_step() -> None:
    store, rng = TextStore(64 << 20), random.Random(4)
    prompts = [rng.choices(range(1000), k=3000) for _ in range(8)]
    places = [TextPlace() for _ in prompts]
    decoding = ([1, 2, 3], TextPlace())
    steps = 0
    while any(place.length < 3000 for place in places):
        store.enter([(b"", *reversed(decoding)), *((b"", *pair) for pair in zip(places, prompts, strict=True))])
        steps += 1
        assert decoding[1].length == 3
        assert {place.length for place in places} == {min(512 * steps, 3000)}
    one = TextPlace()
    store.enter([(b"", one, prompts[0]), (b"", *reversed(decoding))])
    assert one.length == 3000


def tree_of(store: TextStore, scope: bytes) -> TextTree:
    tree = store.tree(scope)
    assert tree is not None
    return tree


def test_scopes_notice_nothing_of_each_other() -> None:
    """What one finds does not depend on how much others enter, nor on the same texts there."""
    rng = random.Random(5)
    texts = [rng.choices(range(3), k=400) for _ in range(60)]
    found = []
    for others in (0, MOST_SCOPES - 1):
        store, answers = TextStore(1 << 20), []
        for text in texts:
            for other in range(others):
                store.enter([(bytes([other]), TextPlace(), text), (bytes([other]), TextPlace(), text[::-1])])
            answers.append(proposed(tree_of(store, b"own"), text[:9]))
            store.enter([(b"own", TextPlace(), text)])
        found.append(answers)
        # What others entered is there, for them alone.
        assert not others or proposed(tree_of(store, b"\0"), texts[-1][:200]) == (texts[-1][200:], 200)
    assert found[0] == found[1]
    assert found[0][0] == ([], 0)


def test_a_scope_without_a_place_waits_until_another_has_rested() -> None:
    store = TextStore(1 << 20)
    places = {bytes([scope]): TextPlace() for scope in range(MOST_SCOPES)}
    text = list(range(20))
    for scope, place in places.items():
        store.enter([(scope, place, text)])
    for _ in range(REST_STEPS - MOST_SCOPES):
        assert store.tree(b"late") is None
        store.enter([(scope, places[scope], text) for scope in list(places)[1:]])
    store.enter([(b"\1", places[b"\1"], text)])
    assert proposed(tree_of(store, b"late"), text[:10]) == ([], 0)
    assert store.tree(b"\0") is None
    assert proposed(tree_of(store, b"\1"), text[:10]) == (text[10:], 10)
    # A sequence whose scope lost its place starts again.
    for _ in range(REST_STEPS):
        store.enter([])
    store.enter([(b"\0", places[b"\0"], [*text, 7])])
    assert proposed(tree_of(store, b"\0"), text[:10]) == ([*text[10:], 7], 10)


@pytest.mark.slow
def test_memory_is_bounded_whatever_comes() -> None:
    """A million tokens in more scopes than there is room for, and a sequence in each."""
    memory, rng = 4 << 20, random.Random(6)
    texts = [rng.choices(range(100_000), k=1000) for _ in range(50)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        store, places = TextStore(memory), [TextPlace() for _ in range(20)]
        for number, text in enumerate(texts * 20):
            # Where the text stood before is no text that comes again.
            store.enter([(bytes([number % 20]), places[number % 20], [number, *text])])
            places[number % 20].truncate(0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert memory * 0.95 < most - before < memory * 1.05
    number = len(texts) * 20 - 20
    known = [number, *texts[number % 50]]
    assert proposed(tree_of(store, b"\0"), known[:2]) == (known[2:], 2)
