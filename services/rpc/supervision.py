"""Tasks that live as long as what they serve, and never end unnoticed.

asyncio keeps the exception of a task to itself until somebody asks for it, and gRPC cancels whoever reads from a call
when the call is cancelled: without more, what such a task served would stand still for good.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from spool.scheduler.errors import SpoolError

logger = logging.getLogger(__name__)


class TaskEndedError(SpoolError, RuntimeError):
    """A task was cancelled by somebody else than its owner."""


class SupervisedTask:
    """Runs a coroutine until it returns or its owner stops it. Any other end is kept as `error` and passed to `on_end`.

    Without `on_end` it is logged, and `check` says it to whoever asks for the health of the owner.
    """

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, None],
        name: str,
        on_end: Callable[[Exception], None] | None = None,
    ) -> None:
        self.name = name
        self.error: Exception | None = None
        self._on_end = on_end or self._log
        self._stopping = False
        self.task = asyncio.create_task(coroutine, name=name)
        self.task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """The owner needs it no more."""
        self._stopping = True
        self.task.cancel()

    async def stop(self) -> None:
        """Cancels it, and waits for its end."""
        self.cancel()
        await asyncio.wait([self.task])

    def check(self) -> None:
        """Raises RuntimeError once the task has ended by itself."""
        if self.error is not None:
            raise RuntimeError(f"{self.name} has ended: {self.error!r}") from self.error

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            error: BaseException | None = None if self._stopping else TaskEndedError(f"{self.name} was cancelled")
        else:
            error = task.exception()
        if not isinstance(error, Exception):
            return  # it has done its work, or the process is about to end
        self.error = error
        if self._stopping:
            self._log(error)
        else:
            self._on_end(error)

    def _log(self, error: Exception) -> None:
        logger.error("%s has ended: %s", self.name, error, exc_info=error)


def is_cancelled() -> bool:
    """Where CancelledError was caught: whether this task was cancelled, and not only a call of gRPC that it awaits."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
