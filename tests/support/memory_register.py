"""The numbers of schedulers that share nothing but a test's process."""

from __future__ import annotations


class MemoryRegister:
    """services.scheduler.epochs.EpochRegister."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()

    async def taken(self) -> set[int]:
        return self.numbers

    async def take(self, number: int) -> bool:
        if number in self.numbers:
            return False
        self.numbers.add(number)
        return True
