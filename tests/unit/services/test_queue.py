"""The step queue: every step's reply reaches the loop, and not before the next step's pass where one is there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from protos import worker_pb2
from services.worker.queue import StepQueue
from tests.support.waiting import LONG

Computing = Callable[[], None]
Step = Callable[[Computing], None]


class Executor:
    """Answers step n after doing what `steps[n]` says, if anything."""

    awaited: Callable[[], bool]

    def __init__(self, steps: dict[int, Step] | None = None) -> None:
        self.ran: list[int] = []
        self._steps = steps or {}

    def clock(self) -> float:
        return 7.0

    def execute(self, request: worker_pb2.StepRequest, arrived: float, computing: Computing) -> worker_pb2.StepReply:
        assert arrived == 7.0
        self.ran.append(request.step_id)
        self._steps.get(request.step_id, lambda computing: computing())(computing)
        return worker_pb2.StepReply(step_id=request.step_id)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool


def queue_of(executor: Executor, thread: ThreadPoolExecutor) -> StepQueue:
    stands_in: Any = executor
    return StepQueue(stands_in, thread)


def step(step_id: int) -> worker_pb2.StepRequest:
    return worker_pb2.StepRequest(step_id=step_id)


def waits_for(event: threading.Event) -> Step:
    def run(computing: Computing) -> None:
        assert event.wait(LONG)
        computing()

    return run


def test_steps_run_in_order_and_each_is_answered(thread: ThreadPoolExecutor) -> None:
    async def run() -> None:
        executor = Executor()
        queue = queue_of(executor, thread)
        async with asyncio.timeout(LONG):
            replies = await asyncio.gather(*(queue.add(step(number)) for number in range(50)))
        assert [reply.step_id for reply in replies] == executor.ran == list(range(50))
        assert queue.running_seconds() is None
        assert queue.step_ended.is_set()

    asyncio.run(run())


def test_a_reply_comes_while_the_next_step_computes(thread: ThreadPoolExecutor) -> None:
    async def run() -> None:
        both_added, first_came = threading.Event(), threading.Event()
        came_before = []

        def second(computing: Computing) -> None:
            came_before.append(first_came.is_set())
            computing()
            # The loop is free all the time: what it was not told of, it cannot know.
            came_before.append(first_came.wait(LONG))

        queue = queue_of(Executor({1: waits_for(both_added), 2: second}), thread)
        replies = [queue.add(step(1)), queue.add(step(2))]
        replies[0].add_done_callback(lambda _: first_came.set())
        both_added.set()
        async with asyncio.timeout(LONG):
            await asyncio.gather(*replies)
        assert came_before == [False, True]

    asyncio.run(run())


def test_a_step_knows_whether_another_one_waits(thread: ThreadPoolExecutor) -> None:
    async def run() -> None:
        seen: list[bool] = []
        runs, added = threading.Event(), threading.Event()

        def first(computing: Computing) -> None:
            seen.append(executor.awaited())
            runs.set()
            assert added.wait(LONG)
            seen.append(executor.awaited())

        executor = Executor({1: first, 2: lambda computing: seen.append(executor.awaited())})
        queue = queue_of(executor, thread)
        replies = [queue.add(step(1))]
        assert await asyncio.to_thread(runs.wait, LONG)
        replies.append(queue.add(step(2)))
        added.set()
        async with asyncio.timeout(LONG):
            await asyncio.gather(*replies)
        assert seen == [False, True, False]

    asyncio.run(run())


def test_a_cancelled_step_is_not_run_and_holds_nothing_up(thread: ThreadPoolExecutor) -> None:
    async def run() -> None:
        both_added = threading.Event()
        executor = Executor({1: waits_for(both_added)})
        queue = queue_of(executor, thread)
        first, second = queue.add(step(1)), queue.add(step(2))
        second.cancel()
        both_added.set()
        async with asyncio.timeout(LONG):
            assert (await first).step_id == 1
            assert (await queue.add(step(3))).step_id == 3
        assert executor.ran == [1, 3]

    asyncio.run(run())


def test_it_says_how_long_a_step_has_been_running(thread: ThreadPoolExecutor) -> None:
    async def run() -> None:
        seen: list[float | None] = []
        runs, go_on = threading.Event(), threading.Event()

        def long(computing: Computing) -> None:
            runs.set()
            assert go_on.wait(LONG)

        queue = queue_of(Executor({1: long}), thread)
        reply = queue.add(step(1))
        assert await asyncio.to_thread(runs.wait, LONG)
        seen.append(queue.running_seconds())
        go_on.set()
        async with asyncio.timeout(LONG):
            await reply
        assert seen[0] is not None
        assert seen[0] >= 0
        assert queue.running_seconds() is None

    asyncio.run(run())
