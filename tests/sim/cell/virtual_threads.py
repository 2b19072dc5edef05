"""Threads in virtual time: the product's code blocks in them as it does in service, and time goes on meanwhile.

Each is a thread of the operating system, of which at most one runs at a time, and only while the event loop waits for
it: the loop hands it the turn, and gets the turn back where the thread sleeps, waits or has nothing to do. So a
schedule takes the same course every time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Self

from tests.sim.cell.virtual_time import VirtualLoop

if TYPE_CHECKING:
    from tests.sim.cell.process import Process


class _EndedError(BaseException):
    """The thread's process is gone: the thread unwinds."""


class Threads:
    """All threads of one loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.present: VirtualThread | None = None
        """The one that runs; None where the loop does."""
        self._all: list[VirtualThread] = []

    def add(self, thread: VirtualThread) -> None:
        self._all.append(thread)

    def end(self) -> None:
        """None may outlive the loop."""
        for thread in self._all:
            thread.shutdown()

    def pause(self, seconds: float | None) -> bool:
        """Of the thread that runs: for so long (None: for ever), or until it is woken. Returns whether it was woken."""
        if self.present is None:
            raise RuntimeError("the event loop would block")
        return self.present.pause(seconds)


class VirtualThread:
    """Runs one call after the other, as code of its process. A call that is cancelled before its turn is skipped."""

    def __init__(self, threads: Threads, process: Process) -> None:
        self.process = process
        self._threads = threads
        self._loop = threads.loop
        self._calls: deque[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._thread: threading.Thread | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._busy = False
        self._stopped = False
        self._ended = False
        self._pauses = 0
        self._woken = False
        threads.add(self)
        process.threads.append(self)

    def clock(self) -> float:
        return self._loop.now

    # On the loop, or on another thread.

    def submit(self, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        if not self._stopped:
            self._calls.append((future, call, args))
            if not self._busy:
                self._busy = True
                self._loop.post(self._loop.now, self._resume, self._pauses)
        return future

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        self._calls.clear()
        self._stopped = True
        if self._thread is not None and self._threads.present is None and not self._ended:
            self._run()

    def wake(self) -> None:
        """Ends its pause."""
        self._woken = True
        self._loop.post(self._loop.now, self._resume, self._pauses)

    def _resume(self, pause: int) -> None:
        if pause == self._pauses and not self._stopped:
            self._run()

    def _run(self) -> None:
        """Hands the turn over, until the thread gives it back."""
        if self._thread is None:
            self._thread = threading.Thread(target=self.process.run, args=(self._main,), daemon=True)
            self._thread.start()
        before, self._threads.present = self._threads.present, self
        self._go.release()
        self._back.acquire()
        self._threads.present = before
        if self._ended:
            self._thread.join()

    # On the thread.

    def pause(self, seconds: float | None) -> bool:
        if self._stopped:
            raise _EndedError
        self._pauses += 1
        self._woken = False
        if seconds is not None:
            self._loop.post(self._loop.now + max(0.0, seconds), self._resume, self._pauses)
        self._give_back()
        return self._woken

    def _give_back(self) -> None:
        self._back.release()
        self._go.acquire()
        if self._stopped:
            raise _EndedError

    def _main(self) -> None:
        self._go.acquire()
        try:
            while not self._stopped:
                while self._calls:
                    self._call(*self._calls.popleft())
                self._busy = False
                self._pauses += 1
                self._give_back()
        except _EndedError:
            pass
        finally:
            self._ended = True
            self._back.release()

    def _call(self, future: asyncio.Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if future.cancelled():
            return
        try:
            result = call(*args)
        except Exception as error:  # noqa: BLE001
            if not future.cancelled():
                future.set_exception(error)
        else:
            if not future.cancelled():
                future.set_result(result)


def result_in(threads: Threads, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What comes of a coroutine that the process of the present thread runs meanwhile."""
    thread = threads.present
    if thread is None:
        raise RuntimeError("the event loop would block")
    task = thread.process.spawn(coroutine)
    task.add_done_callback(lambda _: thread.wake())
    while not task.done():
        thread.pause(None)
    return task.result()


class BlockingThread:
    """What the product needs of `threading.Thread`; of the process that makes it."""

    def __init__(self, threads: Threads, target: Callable[[], None], **_: Any) -> None:
        if threads.present is None:
            raise RuntimeError("the event loop makes no thread")
        self._threads = threads
        self._target = target
        self._thread = VirtualThread(threads, threads.present.process)
        self._ended: asyncio.Future[Any] | None = None

    def start(self) -> None:
        self._ended = self._thread.submit(self._target)

    def join(self) -> None:
        while self._ended is not None and not self._ended.done():
            self._threads.pause(0.001)


class VirtualCondition:
    """What the product needs of `threading.Condition`. Nobody else runs between two pauses, so it locks nothing."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._waiting: dict[VirtualThread, None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:
        thread = self._threads.present
        if thread is None:
            raise RuntimeError("the event loop would block")
        self._waiting[thread] = None
        try:
            return thread.pause(timeout)
        finally:
            self._waiting.pop(thread, None)

    def notify_all(self) -> None:
        for thread in self._waiting:
            thread.wake()

    notify = notify_all


class VirtualEvent:
    """What the product needs of `threading.Event`."""

    def __init__(self, threads: Threads) -> None:
        self._condition = VirtualCondition(threads)
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._condition.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._condition.wait(timeout)
        return self._set


class VirtualQueue:
    """What the product needs of `queue.SimpleQueue`."""

    def __init__(self, threads: Threads) -> None:
        self._condition = VirtualCondition(threads)
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._condition.notify_all()

    def get(self) -> Any:
        while not self._items:
            self._condition.wait()
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)
