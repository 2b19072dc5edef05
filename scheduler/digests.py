"""Digests of token prefixes, by which scheduler and worker agree on what a KV state holds.

A polynomial hash modulo the Mersenne prime 2**61 - 1: one multiplication per token, and every prefix of a list has its
digest at hand, so truncation costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

_MODULUS = (1 << 61) - 1
_BASE = 0x1B873593CC9E2D51 % _MODULUS

EMPTY_DIGEST = 1


def extend_digest(digest: int, token: int) -> int:
    return (digest * _BASE + token + 1) % _MODULUS


class DigestedTokens:
    """A token list that knows the digest of each of its prefixes."""

    __slots__ = ("_digests", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._digests: list[int] = [EMPTY_DIGEST]
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        digest = self._digests[-1]
        for token in tokens:
            digest = (digest * _BASE + token + 1) % _MODULUS
            self._digests.append(digest)
            self.tokens.append(token)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        del self._digests[length + 1 :]

    def digest(self, length: int) -> int:
        """Digest of the first `length` tokens. Raises IndexError past the end."""
        return self._digests[length]
