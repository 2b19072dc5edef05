"""Runs a command's coroutine so that Ctrl-C ends it at any moment."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_until_interrupted(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`, with SIGINT as an event of the loop: cancels `main` and raises KeyboardInterrupt at its end.

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

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            return await main
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
