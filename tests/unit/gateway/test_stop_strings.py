"""Stop strings, compared with a plain search through the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.stop_strings import StopStringCutter

LETTERS = st.text(alphabet="ab漢", max_size=24)
STOPS = st.lists(st.text(alphabet="ab漢", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The remaining text, when the text comes character by character, and the stop string that ended it."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_cuts_as_a_search_through_the_whole_text_does(pieces: list[str], stops: list[str]) -> None:
    cutter = StopStringCutter(stops)
    out = "".join(cutter.push(piece) for piece in pieces)
    expected, stop = cut("".join(pieces), stops)
    assert cutter.hit == stop
    assert out + ("" if stop else cutter.finish()) == expected


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_holds_back_what_may_become_a_stop_string_and_nothing_else(pieces: list[str], stops: list[str]) -> None:
    cutter = StopStringCutter(stops)
    seen = out = ""
    for piece in pieces:
        seen += piece
        out += cutter.push(piece)
        if cutter.hit is not None:
            break
        held = max(
            (size for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])),
            default=0,
        )
        assert out == seen[: len(seen) - held]


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["one tw", "o three"], ["two"], "one "),
        (["ab", "abc"], ["ababc"], ""),
        (["aab", "aaab"], ["aaab"], "aab"),
        (["x", "\n", "\n", "y"], ["\n\n"], "x"),
        (["abcd"], ["bc", "abcde"], "a"),
        (["abc"], ["bc", "abc"], ""),
        (["abab"], ["abac"], "abab"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], text: str) -> None:
    cutter = StopStringCutter(stops)
    assert "".join(cutter.push(piece) for piece in pieces) + cutter.finish() == text


def test_nothing_comes_after_the_end() -> None:
    cutter = StopStringCutter(["b"])
    assert cutter.push("ab") == "a"
    assert cutter.push("more") == ""
    assert cutter.finish() == ""
