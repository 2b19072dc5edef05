"""The epochs by which workers tell schedulers apart: a register gives each number out once, and no clock is asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from spool.scheduler.errors import SpoolError

_HIGHEST_UNKNOWN = (1 << 63) - 1
"""Of the epochs that workers may report and the register does not know. What an epoch has room for above it is left to
schedulers that start, so that no report can use it up."""
_CONNECTIONS = 1 << 32
"""Epochs of one scheduler, of which each of its connections takes the next."""
_REMEMBERED = 64
"""Numbers below the highest that the register keeps."""


class SupersededError(SpoolError):
    """Another scheduler has taken a number since."""


class EpochRegister(Protocol):
    """Remembers the highest numbers that schedulers took, for longer than any scheduler lives."""

    async def taken(self) -> Iterable[int]: ...

    async def take(self, number: int) -> bool:
        """False where somebody has taken the number before; of those who ask at the same time, one gets it."""

    async def forget(self, numbers: Iterable[int]) -> None:
        """These are as if nobody had taken them. Somebody else may have forgotten some of them meanwhile."""


class MemoryRegister:
    """For schedulers in one process, over workers that no other process reaches."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()

    async def taken(self) -> set[int]:
        return self.numbers

    async def take(self, number: int) -> bool:
        if number in self.numbers:
            return False
        self.numbers.add(number)
        return True

    async def forget(self, numbers: Iterable[int]) -> None:
        self.numbers.difference_update(numbers)


class EpochAuthority:
    """Numbers the schedulers that share a register. The scheduler with the highest number is the one that counts."""

    def __init__(self, register: EpochRegister) -> None:
        self._register = register

    async def claim(self) -> int:
        """The first epoch of a scheduler that starts, above those of all before it."""
        while True:
            number = await self._highest() + 1
            if await self._take(number):
                return number * _CONNECTIONS

    async def renew(self, epoch: int, above: int) -> int:
        """A scheduler with this epoch has met a higher one: a new epoch `above` that.

        Raises SupersededError if another scheduler has claimed an epoch since. If none has, the higher epoch was given
        out by a register that is lost; ValueError if no register can have given it out.
        """
        own, highest = epoch // _CONNECTIONS, await self._highest()
        if highest > own:
            raise _superseded(highest, own)
        if above > _HIGHEST_UNKNOWN:
            raise ValueError(f"highest_scheduler_epoch is {above}, must be at most {_HIGHEST_UNKNOWN}")
        number = max(own, above // _CONNECTIONS) + 1
        if not await self._take(number):
            raise _superseded(number, own)
        return number * _CONNECTIONS

    async def _take(self, number: int) -> bool:
        """False where somebody has taken the number before, as far as the register knows."""
        if not await self._register.take(number):
            return False
        taken = list(await self._register.taken())
        # The highest number is never forgotten, so one that was forgotten before it was taken again is seen to be.
        if number <= max(taken) - _REMEMBERED:
            return False
        old = [each for each in taken if each <= number - _REMEMBERED]
        if old:
            await self._register.forget(old)
        return True

    async def _highest(self) -> int:
        return max(await self._register.taken(), default=0)


def _superseded(number: int, own: int) -> SupersededError:
    return SupersededError(f"a scheduler with number {number} has taken over, this one's is {own}")
