"""Schedulers are numbered, each number once; of two that meet, the register says which one counts."""

from __future__ import annotations

import asyncio
import itertools

from services.scheduler.epochs import EpochAuthority, MemoryRegister, SupersededError


class SlowRegister(MemoryRegister):
    """Everybody sees what is taken before anybody takes a number."""

    async def taken(self) -> set[int]:
        before = set(self.numbers)
        await asyncio.sleep(0)
        return before


async def test_schedulers_that_start_at_once_have_different_epochs() -> None:
    register = SlowRegister()
    epochs = await asyncio.gather(*(EpochAuthority(register).claim() for _ in range(20)))
    assert register.numbers == set(range(1, 21))
    assert len(set(epochs)) == 20
    # Each has room for its connections below the next.
    ordered = sorted(epochs)
    assert min(later - earlier for earlier, later in itertools.pairwise(ordered)) >= 1 << 32


async def test_of_two_that_renew_at_once_one_counts() -> None:
    register = SlowRegister()
    authority = EpochAuthority(register)
    epoch = await authority.claim()
    outcomes = await asyncio.gather(
        *(authority.renew(epoch, above=epoch + 5) for _ in range(2)), return_exceptions=True
    )
    assert sorted(isinstance(outcome, SupersededError) for outcome in outcomes) == [False, True]
