"""An asyncio event loop whose clock jumps from one timer to the next.

Nothing waits for anything real, so the same program with the same random numbers takes the same course every time.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class TaskOwner(Protocol):
    def adopt(self, task: asyncio.Task[Any]) -> None: ...


class Executor(Protocol):
    def submit(self, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]: ...


OWNER: contextvars.ContextVar[TaskOwner | None] = contextvars.ContextVar("OWNER", default=None)
"""Whose code is running; tasks and timers inherit it."""


class StandstillError(RuntimeError):
    """Everybody waits, and no timer is left that could wake anybody; or so much happens that time does not go on."""


_MOST_ROUNDS = 100_000
"""Of callbacks that call for callbacks, all at one time."""


class _Timer(asyncio.TimerHandle):
    """What asyncio needs to cancel a timer; the loop has the rest."""

    __slots__ = ()

    def __init__(self, when: float) -> None:
        self._when = when
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True


_Call = tuple[contextvars.Context | None, Callable[..., object], tuple[Any, ...], asyncio.Handle | None]
"""In which context to call what with which arguments, unless the handle says that it is cancelled."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Knows no sockets and no threads. `now` is the virtual time in seconds; timers of the same time run in order.

    An error in a callback goes to the exception handler, with the `owner` of the callback.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._calls: deque[_Call] = deque()
        self._timers: list[tuple[float, int, _Call]] = []
        self._timer_count = 0

    def time(self) -> float:
        return self.now

    # Faster than what they replace: a schedule is ten thousand of these.

    def post(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        """As `call_at`, for what nobody cancels and no process owns."""
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, (None, callback, args, None)))

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when)
        self._timer_count += 1
        call = (context or contextvars.copy_context(), callback, args, timer)
        heapq.heappush(self._timers, (when, self._timer_count, call))
        return timer

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_soon(self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None) -> Any:
        # Tasks and futures come with a context and do not look at what is returned.
        if context is not None:
            self._calls.append((context, callback, args, None))
            return None
        timer = _Timer(self.now)
        self._calls.append((contextvars.copy_context(), callback, args, timer))
        return timer

    def _run_once(self) -> None:
        """All that is ready; where nothing is, the clock moves on to the next timer. Returns when the loop stops."""
        ready, timers, pop = self._calls, self._timers, heapq.heappop
        rounds = 0
        while not self._stopping:
            if not ready:
                while timers and (handle := timers[0][2][3]) is not None and handle._cancelled:
                    pop(timers)
                if not timers:
                    raise StandstillError("nothing is left to happen")
                self.now = max(self.now, timers[0][0])
                rounds = 0
            rounds += 1
            if rounds > _MOST_ROUNDS:
                raise StandstillError("time does not go on")
            while timers and timers[0][0] <= self.now:
                ready.append(pop(timers)[2])
            for _ in range(len(ready)):
                context, callback, args, handle = ready.popleft()
                if handle is not None and handle._cancelled:
                    continue
                try:
                    if context is None:
                        callback(*args)
                    else:
                        context.run(callback, *args)
                except Exception as error:  # noqa: BLE001
                    owner = context.get(OWNER) if context is not None else None
                    message = f"error in a callback: {error!r}"
                    self.call_exception_handler({"message": message, "exception": error, "owner": owner})

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        return self.call_soon(callback, *args, context=context)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        owner = OWNER.get() if context is None else context.get(OWNER)
        if owner is not None:
            owner.adopt(task)
        return task

    def run_in_executor(self, executor: Executor, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return executor.submit(call, *args)


def result_of(coroutine: Coroutine[Any, Any, T]) -> T:
    """Of a coroutine that waits for nothing. Raises RuntimeError where it waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError(f"{coroutine.__qualname__} waits")
