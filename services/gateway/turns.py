"""Places that keys share: whoever asks for many waits for itself."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from spool.scheduler.errors import SpoolError
from spool.services.observability.request_ids import current_account

P = ParamSpec("P")
T = TypeVar("T")

_REST = 9.0
"""Seconds for each second of CPU time: what fails of a key takes at most a tenth of a core in the long run."""


class TooManyWaitError(SpoolError):
    """As many of the key wait as may."""


class KeyTurns:
    """At most `places` (None: any number) are taken at a time, of them `of_a_key` by one key, and at most
    `waiting_of_a_key` (None: any number) of a key wait for one. Keys that wait get places in turn; one that rests gets
    none."""

    def __init__(self, places: int | None, of_a_key: int, waiting_of_a_key: int | None = None) -> None:
        self._places, self._of_a_key, self._waiting_of_a_key = places, of_a_key, waiting_of_a_key
        self._taken: Counter[str] = Counter()
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        """Of the keys that wait, the next one first."""
        self._resting: dict[str, float] = {}
        """Until when, in the event loop's time."""

    @asynccontextmanager
    async def place(self, key: str) -> AsyncIterator[None]:
        """Takes a place, once there is one for the key. Raises TooManyWaitError."""
        await self.take(key)
        try:
            yield
        finally:
            self.give_back(key)

    async def take(self, key: str) -> None:
        """As `place` does; `give_back` must follow."""
        line = self._lines.get(key)
        if line is None and self._has_place(key):
            self._taken[key] += 1
            return
        if line is not None and self._waiting_of_a_key is not None and len(line) >= self._waiting_of_a_key:
            raise TooManyWaitError
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(key, turn)
            else:  # it came just then
                self.give_back(key)
            raise

    def give_back(self, key: str) -> None:
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]
        self._hand_out()

    def rest_after_failure(self, key: str, cpu_seconds: float) -> None:
        """Work of the key failed after so much CPU time. The key gets no place for `_REST` times as long, after what
        it has still to rest."""
        loop = asyncio.get_running_loop()
        until = self._resting[key] = max(loop.time(), self._resting.get(key, 0.0)) + _REST * cpu_seconds
        loop.call_at(until, self._rested, key, until)

    def _rested(self, key: str, until: float) -> None:
        if self._resting.get(key) == until:
            del self._resting[key]
            self._hand_out()

    def _hand_out(self) -> None:
        for waiting in list(self._lines):
            if self._has_place(waiting):
                line = self._lines.pop(waiting)
                turn = next((one for one in line if not one.cancelled()), None)
                if turn is not None:
                    line.remove(turn)
                    turn.set_result(None)
                    self._taken[waiting] += 1
                if line:
                    self._lines[waiting] = line  # behind the others

    def _has_place(self, key: str) -> bool:
        free = self._places is None or self._taken.total() < self._places
        return free and self._taken[key] < self._of_a_key and key not in self._resting

    def _leave(self, key: str, turn: asyncio.Future[None]) -> None:
        line = self._lines[key]
        line.remove(turn)
        if not line:
            del self._lines[key]


class KeyedThreads:
    """Threads for work that takes long, in which API keys take turns. A key whose work fails rests then."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="requests")
        self._turns = KeyTurns(count, count)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `asyncio.to_thread`. Work that has begun goes on when nobody waits for it any more, in its key's place."""
        account, context = current_account(), contextvars.copy_context()
        await self._turns.take(account)
        wasted: float | None = None

        def measured() -> T:
            nonlocal wasted
            began = time.thread_time()
            try:
                return context.run(work, *args, **kwargs)
            except BaseException:
                wasted = time.thread_time() - began
                raise

        def ended(_: object) -> None:
            if wasted is not None:
                self._turns.rest_after_failure(account, wasted)
            self._turns.give_back(account)

        running = asyncio.get_running_loop().run_in_executor(self._threads, measured)
        running.add_done_callback(ended)
        return await asyncio.shield(running)
