"""How many tokens a key may still use: a bucket that fills at a constant rate."""

from __future__ import annotations

_SECONDS_OF_RATE = 60.0


class TokenBucket:
    """Holds up to one minute's tokens and begins full.

    What a sequence will use is known only once it was served, so the level may fall below zero; the debt is paid off
    before anything new is let in, and the mean rate holds. Times are seconds on one monotonic clock, passed in.
    """

    def __init__(self, tokens_per_minute: int) -> None:
        self._capacity = float(tokens_per_minute)
        self._rate = tokens_per_minute / _SECONDS_OF_RATE
        self._level = self._capacity
        self._filled_at: float | None = None

    def level(self, now: float) -> float:
        """Tokens in the bucket."""
        if self._filled_at is not None and now > self._filled_at:
            self._level = min(self._capacity, self._level + self._rate * (now - self._filled_at))
        self._filled_at = now
        return self._level

    def debit(self, tokens: int, now: float) -> None:
        self._level = self.level(now) - tokens

    def seconds_until_token(self, now: float) -> float:
        """Until there is at least one token, if nothing is used meanwhile; 0 where there is one."""
        return max(0.0, (1.0 - self.level(now)) / self._rate)
