"""Schedulers are numbered, each number once; of two that meet, the register says which one counts."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from spool.deploy.processes.task import FileEpochs
from spool.services.scheduler.epochs import EpochAuthority, MemoryRegister, SupersededError


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


@pytest.mark.parametrize("in_files", [False, True])
async def test_a_register_does_not_grow(tmp_path: Path, in_files: bool) -> None:
    register = FileEpochs(tmp_path) if in_files else MemoryRegister()
    authority = EpochAuthority(register)
    epochs = [await authority.claim() for _ in range(200)]
    assert epochs == sorted(set(epochs))
    kept = len(list(await register.taken()))
    assert kept < 100
    epoch = await authority.renew(epochs[-1], above=1 << 60)
    assert epoch > 1 << 60
    assert await authority.claim() > epoch
    assert len(list(await register.taken())) == 2


class StalledRegister(MemoryRegister):
    """Whoever asks first for what is taken hears of it late."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.goes_on = asyncio.Event(), asyncio.Event()

    async def taken(self) -> set[int]:
        before = set(self.numbers)
        if not self.asked.is_set():
            self.asked.set()
            await self.goes_on.wait()
        return before


async def test_a_number_that_was_forgotten_is_not_given_out_again() -> None:
    register = StalledRegister()
    authority = EpochAuthority(register)
    late = asyncio.create_task(authority.claim())
    await register.asked.wait()
    epochs = [await authority.claim() for _ in range(200)]
    assert 1 not in register.numbers
    register.goes_on.set()
    assert await late > max(epochs)
