"""The targets of every cell: those that are up, those that start, and those that are away with their node."""

from __future__ import annotations

import numpy as np

from bench.fleet.speeds import Floats


class Replicas:
    """Each cell has GPUs for `most` targets. What is asked for starts where there is a GPU, and takes a while."""

    def __init__(self, cells: int, up: int, most: int, start_seconds: float) -> None:
        self._most = most
        self._start_seconds = start_seconds
        self.up = np.full(cells, float(up))
        self.asked = np.full(cells, float(up))
        self._ready: list[list[float]] = [[] for _ in range(cells)]
        self._next = np.full(cells, np.inf)
        self._away: list[list[tuple[float, int]]] = [[] for _ in range(cells)]
        self._closed: set[int] = set()
        """Cells of a lost zone."""

    @property
    def asked_for(self) -> Floats:
        """By cells that are there."""
        found = self.asked.copy()
        found[list(self._closed)] = 0.0
        return found

    @property
    def starting(self) -> Floats:
        return np.array([len(ready) for ready in self._ready], dtype=np.float64)

    def ask(self, cell: int, number: int, now: float) -> None:
        """Starts what is missing; stops what is too many, those first that are still starting."""
        self.asked[cell] = number
        if cell in self._closed:
            return
        ready = self._ready[cell]
        number = min(number, self._most - self._gone(cell, now))
        missing = number - int(self.up[cell]) - len(ready)
        if missing > 0:
            ready.extend([now + self._start_seconds] * missing)
        elif missing < 0:
            kept = max(0, len(ready) + missing)
            self.up[cell] = min(self.up[cell], float(number))
            del ready[kept:]
        self._next[cell] = min(ready, default=np.inf)

    def come_up(self, now: float) -> None:
        """Those that have started by now."""
        for cell in np.flatnonzero(self._next <= now):
            ready = self._ready[cell]
            self.up[cell] += sum(time <= now for time in ready)
            self._ready[cell] = [time for time in ready if time > now]
            self._next[cell] = min(self._ready[cell], default=np.inf)

    def lose_node(self, cell: int, places: int, now: float, until: float) -> float:
        """A node with places for so many targets is away until then. The share of its targets that the cell loses."""
        free = max(1, self._most - self._gone(cell, now))
        self._away[cell].append((until, places))
        lost = round(self.up[cell] * min(1.0, places / free))
        share = lost / self.up[cell] if self.up[cell] else 0.0
        self.up[cell] -= lost
        self.ask(cell, int(self.asked[cell]), now)
        return float(share)

    def close(self, cell: int) -> None:
        """All its targets are gone, and none starts."""
        self._closed.add(cell)
        self.up[cell] = 0.0
        self._ready[cell].clear()
        self._next[cell] = np.inf

    def open(self, cell: int, now: float) -> None:
        """As many as were asked for before start anew."""
        self._closed.discard(cell)
        self.ask(cell, int(self.asked[cell]), now)

    def _gone(self, cell: int, now: float) -> int:
        self._away[cell] = [one for one in self._away[cell] if one[0] > now]
        return sum(places for _, places in self._away[cell])
