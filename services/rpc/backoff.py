"""Times in the talk between processes: checks of options, and the pauses between attempts to reach one another."""

from __future__ import annotations

import asyncio


def require_positive(options: object, *names: str) -> None:
    """Raises ValueError naming the first of these attributes that is not above 0."""
    for name in names:
        value = getattr(options, name)
        if not value > 0:
            raise ValueError(f"{name} is {value}, must be above 0")


async def pause(seconds: float, hurry: asyncio.Event) -> None:
    """Waits, but no longer than until `hurry` is set. The event is clear afterwards."""
    try:
        async with asyncio.timeout(seconds):
            await hurry.wait()
    except TimeoutError:
        return
    finally:
        hurry.clear()


class Backoff:
    """The pauses of one loop that tries to reach another process, in seconds.

    Each pause is twice as long as the one before, from `first` up to `longest`. `hurry` cuts a pause short. tenacity
    counts the attempts of a single call; a loop that connects, works for hours and then connects again would need a new
    counter after every success and has no exception to retry on, so these few lines are simpler.
    """

    def __init__(self, first: float, longest: float, hurry: asyncio.Event | None = None) -> None:
        self._first = first
        self._longest = longest
        self._hurry = hurry
        self.seconds = first
        """How long the next pause is."""

    def reset(self) -> None:
        """An attempt has succeeded: starts again with the shortest pause."""
        self.seconds = self._first

    def use_longest(self) -> None:
        """Trying again soon is of no use."""
        self.seconds = self._longest

    async def pause(self) -> None:
        seconds, self.seconds = self.seconds, min(self.seconds * 2, self._longest)
        if self._hurry is None:
            await asyncio.sleep(seconds)
        else:
            await pause(seconds, self._hurry)
