"""How busy a draft worker is, from what it says of itself whenever it registers."""

from __future__ import annotations

from collections import deque

# Whether a draft worker computes changes many times a second; its share of busy time is the mean over this time.
_SHARE_SECONDS = 10.0


class DraftLoad:
    """The load of one draft worker. `now` is in seconds on one monotonic clock."""

    def __init__(self) -> None:
        self.queued = 0
        """Sequences that waited for it when it registered last."""
        self._epoch: int | None = None
        self._heard: deque[tuple[float, float]] = deque()
        """Of one start of the worker: when it registered, and for how long it had computed by then."""

    def hear(self, worker_epoch: int, busy_seconds: float, queued: int, now: float) -> tuple[float, float]:
        """Takes what the worker says: how long it has computed since its start, and the sequences that wait for it.

        Returns the seconds since it said so last, and for how many of them it has computed. Another start of it begins
        anew, with none of both.
        """
        heard = self._heard
        if worker_epoch != self._epoch or (heard and busy_seconds < heard[-1][1]):
            heard.clear()
        self._epoch, self.queued = worker_epoch, queued
        heard.append((now, busy_seconds))
        while len(heard) > 2 and heard[1][0] <= now - _SHARE_SECONDS:
            heard.popleft()
        before, busy_before = heard[-2] if len(heard) > 1 else heard[-1]
        return now - before, busy_seconds - busy_before

    @property
    def busy_share(self) -> float:
        """The part of the last seconds in which it computed, in [0, 1]; 0 before it has registered twice."""
        if len(self._heard) < 2:
            return 0.0
        (first, busy_first), (last, busy_last) = self._heard[0], self._heard[-1]
        return min((busy_last - busy_first) / (last - first), 1.0) if last > first else 0.0
