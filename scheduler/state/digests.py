"""Digests of token prefixes, by which scheduler and worker agree on what a KV state holds.

A hash in the manner of FNV-1a, a whole token at a time: exclusive or, then a multiplication modulo 2**60, which Python
does on two machine digits. Every prefix of a list has its digest at hand, so truncation costs nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable

_MASK = (1 << 60) - 1
# Odd, so that no two digests become one.
_FACTOR = 0xBB873593CC9E2D5

EMPTY_DIGEST = 0xBF29CE484222325


class DigestedTokens:
    """A token list that knows the digest of each of its prefixes."""

    __slots__ = ("digests", "tokens")

    def __init__(self, tokens: Collection[int] = ()) -> None:
        self.tokens: list[int] = []
        # Machine integers: a fifth of the memory of a list of int objects, and nothing for the collector to visit.
        self.digests = array("Q", (EMPTY_DIGEST,))
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Collection[int]) -> None:
        digest, append = self.digests[-1], self.digests.append
        for token in tokens:
            digest = (digest ^ token) * _FACTOR & _MASK
            append(digest)
        self.tokens += tokens

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        del self.digests[length + 1 :]

    def digest(self, length: int) -> int:
        """Digest of the first `length` tokens. Raises IndexError past the end."""
        return self.digests[length]

    def digest_with(self, more: Iterable[int], length: int = -1) -> int:
        """Digest of all tokens, or the first `length`, and these behind them."""
        digest = self.digests[length]
        for token in more:
            digest = (digest ^ token) * _FACTOR & _MASK
        return digest
