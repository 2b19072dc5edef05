"""Places that keys share."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from spool.services.gateway.turns import KeyedThreads, KeyTurns, TooManyWaitError
from spool.services.observability.request_ids import note_key
from tests.support.waiting import LONG, until


async def begun(turns: KeyTurns, keys: str) -> tuple[list[asyncio.Task[None]], list[str]]:
    """A task for each letter, which is a key, that takes a place and keeps it; and whose turn came, in order."""
    came: list[str] = []

    async def take(key: str) -> None:
        await turns.take(key)
        came.append(key)

    tasks = [asyncio.create_task(take(key)) for key in keys]
    await asyncio.sleep(0)
    return tasks, came


async def given_back(turns: KeyTurns, *keys: str) -> None:
    for key in keys:
        turns.give_back(key)
        await asyncio.sleep(0)


def test_keys_that_wait_get_places_in_turn() -> None:
    async def drive() -> None:
        turns = KeyTurns(2, 2)
        tasks, came = await begun(turns, "aaaaabbc")
        assert came == ["a", "a"]
        await given_back(turns, *"aabcab")
        assert came == [*"aa", *"abcaba"]
        await asyncio.gather(*tasks)

    asyncio.run(drive())


def test_a_key_has_no_more_places_than_it_may() -> None:
    async def drive() -> None:
        turns = KeyTurns(None, 2)
        tasks, came = await begun(turns, "aaaab")
        assert came == ["a", "a", "b"]
        await given_back(turns, "b")
        assert came == ["a", "a", "b"]
        await given_back(turns, "a", "a")
        assert came == [*"aab", *"aa"]
        await asyncio.gather(*tasks)

    asyncio.run(drive())


def test_more_of_a_key_than_may_wait_are_refused_and_others_are_not() -> None:
    async def drive() -> None:
        turns = KeyTurns(1, 1, 2)
        tasks, came = await begun(turns, "aaab")
        with pytest.raises(TooManyWaitError):
            await turns.take("a")
        await given_back(turns, *"aab")
        assert came == [*"aaba"]
        await asyncio.gather(*tasks)

    asyncio.run(drive())


def test_who_leaves_takes_no_turn() -> None:
    """Whether its turn was still to come, has just come, or comes while it leaves."""

    async def drive() -> None:
        turns = KeyTurns(1, 1)
        tasks, came = await begun(turns, "abcde")
        tasks[1].cancel()
        await asyncio.sleep(0)
        tasks[2].cancel()
        turns.give_back("a")
        tasks[3].cancel()  # its turn has come
        await asyncio.gather(*tasks, return_exceptions=True)
        assert came == ["a", "e"]
        await given_back(turns, "e")
        async with turns.place("f"):
            pass

    asyncio.run(drive())


def stopped_clock() -> list[float]:
    """The running event loop's, which shows the only entry."""
    loop = asyncio.get_running_loop()
    now = [loop.time()]
    loop.time = lambda: now[0]  # type: ignore[method-assign]
    return now


async def turned_to(clock: list[float], seconds: float) -> None:
    clock[0] = seconds
    for _ in range(3):  # the timers, then whose turn comes
        await asyncio.sleep(0)


def test_a_key_whose_work_failed_rests_nine_times_as_long_as_that_took() -> None:
    """In all, where several of its work fail at a time. Others get their places meanwhile."""

    async def drive() -> None:
        clock, turns = stopped_clock(), KeyTurns(2, 2)
        tasks, came = await begun(turns, "aaaab")
        start = clock[0]
        for seconds in (0.5, 0.0, 1.5):
            turns.rest_after_failure("a", seconds)
        await given_back(turns, *"aa")
        assert came == [*"aa", "b"]
        await turned_to(clock, start + 17.5)
        assert came == [*"aa", "b"]
        await turned_to(clock, start + 18.5)
        assert came == [*"aa", "b", "a"]
        await given_back(turns, "b")
        await asyncio.gather(*tasks)

    asyncio.run(drive())


def test_a_key_rests_after_what_failed_in_threads_and_only_then() -> None:
    async def drive() -> None:
        clock, threads, began = stopped_clock(), KeyedThreads(2), list[str]()

        def work(name: str, fails: bool) -> float:
            began.append(name)
            start = time.thread_time()
            while time.thread_time() - start < 0.02:
                pass
            if fails:
                raise ValueError(name)
            return time.thread_time() - start

        async def asked(key: str, name: str, fails: bool = False) -> float:
            note_key(key, b"")
            return await threads.run(work, name, fails)

        for name in ("first", "second"):
            await asyncio.create_task(asked("one", name))
        with pytest.raises(ValueError, match="third"):
            await asyncio.create_task(asked("one", "third", fails=True))
        waiting = asyncio.create_task(asked("one", "fourth"))
        await asyncio.create_task(asked("other", "other"))
        await turned_to(clock, clock[0] + 8.9 * 0.02)
        await asyncio.create_task(asked("other", "another"))
        assert began == ["first", "second", "third", "other", "another"]
        await turned_to(clock, clock[0] + LONG)
        await waiting
        assert began[-1] == "fourth"

    asyncio.run(drive())


def test_keys_take_turns_in_threads() -> None:
    """Also where the requests whose work is under way have been given up."""

    async def drive() -> None:
        threads, done = KeyedThreads(2), threading.Semaphore(0)
        order: list[str] = []

        def work(name: str) -> str:
            order.append(name)
            done.acquire(timeout=LONG)
            return name

        async def asked(key: str, name: str) -> str:
            note_key(key, b"")
            return await threads.run(work, name)

        many = [asyncio.create_task(asked("many", f"many {number}")) for number in range(6)]
        await until(lambda: len(order) == 2)
        one = asyncio.create_task(asked("one", "one"))
        await asyncio.sleep(0)
        for given_up in (*many[:2], many[4]):
            given_up.cancel()
        await asyncio.gather(*many[:2], many[4], return_exceptions=True)
        assert len(order) == 2  # what has begun keeps its thread
        for _ in range(6):
            done.release()
        assert await asyncio.gather(one, many[2], many[3], many[5]) == ["one", "many 2", "many 3", "many 5"]
        assert "one" in order[2:4]
        assert sorted(order) == ["many 0", "many 1", "many 2", "many 3", "many 5", "one"]

    asyncio.run(drive())
