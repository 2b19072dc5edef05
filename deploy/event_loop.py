"""Runs a command's coroutine so that a signal ends it at any moment."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_until_interrupted(
    main: Coroutine[Any, Any, Result], signals: Sequence[signal.Signals] = (signal.SIGINT,)
) -> Result:
    """`asyncio.run`; a signal cancels `main`, and KeyboardInterrupt is raised at its end.

    asyncio's own handler cancels between any two instructions, and what is cancelled while the loop is about to give it
    a result makes that raise InvalidStateError.
    """
    interrupted = False

    async def run() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def interrupt() -> None:
            nonlocal interrupted
            interrupted = True
            if task is not None:
                task.cancel()

        for number in signals:
            loop.add_signal_handler(number, interrupt)
        try:
            return await main
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
