"""Stop strings, compared with a plain search through the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spool.services.gateway.stop_strings import StopStringCutter

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
def test_cuts_as_a_search_through_the_whole_text_and_holds_back_no_more_than_it_must(
    pieces: list[str], stops: list[str]
) -> None:
    cutter = StopStringCutter(stops)
    seen = out = ""
    for piece in pieces:
        seen += piece
        out += cutter.push(piece)
        if cutter.hit is None:
            beginnings = [size for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])]
            assert out == seen[: len(seen) - max(beginnings, default=0)]
    out += cutter.finish()
    assert (out, cutter.hit) == cut("".join(pieces), stops)
