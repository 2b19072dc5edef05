"""Prompt lookup: what followed the last tokens where they stood in the same history before. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence

NOWHERE = -1


class TokenPlaces:
    """Where each token of one growing history stands: a chain from every place to the one before with the same token.

    It costs time for new tokens only, and memory of one entry per distinct token and one number per place.
    """

    __slots__ = ("_earlier", "_latest", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._earlier: list[int] = []
        self._latest: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def follow(self, history: Sequence[int]) -> None:
        """Takes in what `history` has beyond the tokens known; these it must begin with."""
        self.extend(history[len(self._tokens) :])

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._earlier.append(self._latest.get(token, NOWHERE))
            self._latest[token] = len(self._tokens)
            self._tokens.append(token)

    def truncate(self, length: int) -> None:
        """Forgets the places from `length` on."""
        while len(self._tokens) > length:
            token, place = self._tokens.pop(), self._earlier.pop()
            if place == NOWHERE:
                del self._latest[token]
            else:
                self._latest[token] = place

    def continuation(self, count: int, shortest: int, longest: int) -> list[int]:
        """The `count` tokens after the latest earlier place where the longest possible ending of the history stood.

        Endings of `shortest` to `longest` tokens are looked for; the list is empty where none stood anywhere before.
        """
        tokens, earlier = self._tokens, self._earlier
        last = len(tokens) - 1
        longest = min(longest, last)
        if count < 1 or longest < shortest:
            return []
        match, matched = NOWHERE, shortest - 1
        place = earlier[last]
        while place >= matched:
            # Only what goes on one token further than the best so far can be better.
            if tokens[place - matched] == tokens[last - matched]:
                length = 1
                while length < longest and length <= place and tokens[place - length] == tokens[last - length]:
                    length += 1
                if length > matched:
                    match, matched = place, length
                    if length == longest:
                        break
            place = earlier[place]
        if match == NOWHERE:
            return []
        proposal: list[int] = []
        for after in range(match + 1, match + 1 + count):
            # A match that reaches the end of the history goes on periodically.
            proposal.append(tokens[after] if after <= last else proposal[after - last - 1])
        return proposal
