"""Tokens that wait for a reader who is slower than they come."""

from __future__ import annotations

from scheduler.messages import TokenLogprobs
from services.sequence_stream import TokenDelta


class DeltaBuffer:
    """Deltas of one sequence, merged into one: what waits is never more than the sequence's output."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._drafted = 0
        self._accepted = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, delta: TokenDelta) -> None:
        self._tokens.extend(delta.tokens)
        self._logprobs.extend(delta.logprobs)
        self._drafted += delta.drafted
        self._accepted += delta.accepted

    def take(self) -> TokenDelta:
        """Everything that waits; the buffer is empty then."""
        delta = TokenDelta(tuple(self._tokens), self._drafted, self._accepted, logprobs=tuple(self._logprobs))
        self._tokens, self._logprobs = [], []
        self._drafted = self._accepted = 0
        return delta
