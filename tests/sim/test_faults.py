"""Cells of the services' own code under faults, in virtual time: nothing is lost, comes twice or leaks."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from scheduler.transitions.table import TRANSITIONS
from tests.sim.cell.plan import FAULTS, HANGING, SPORADIC, TRUNCATED
from tests.sim.cell.schedule import ScheduleResult, run_schedule
from tests.sim.cell.shrinking import fewest, shrink
from tests.sim.cell.virtual_time import StandstillError, VirtualLoop, VirtualThread
from tests.sim.test_planted_bugs import releases_are_forgotten

ROOT = Path(__file__).parents[2]
PREPARED = "verifying: prepared"


def digest(result: ScheduleResult) -> str:
    return hashlib.sha256(repr(result.events).encode()).hexdigest()


def happened(result: ScheduleResult, *words: str) -> int:
    """Events that begin with these words."""
    return sum(event[1 : 1 + len(words)] == words for event in result.events)


WHAT_FAULTS_DO: dict[str, tuple[tuple[str, ...], int]] = {
    "two schedulers": (("scheduler closed",), 1),
    "scheduler crash": (("scheduler dies",), 4),
    "worker crash": (("worker dies",), 4),
    "worker leaves": (("worker dies",), 4),
    "worker drains": (("worker dies",), 4),
    "gateway crash": (("gateway dies",), 4),
    "lost kv": (("kv lost",), 25),
    HANGING: (("worker hangs",), 1),
    SPORADIC: (("worker dies",), 2),
}
"""Events that there are at least so many of in four schedules."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", [*FAULTS, HANGING, SPORADIC, TRUNCATED])
def test_one_kind_of_fault_breaks_no_rule(kind: str) -> None:
    """And it does what it is for."""
    results = [run_schedule(seed, kinds=(kind,)) for seed in range(4)]
    assert all(result.faults[kind] >= 2 for result in results)
    assert all(result.outcomes.total() == 200 for result in results)
    words, count = WHAT_FAULTS_DO.get(kind, ((), 0))
    assert sum(happened(result, *words) for result in results) >= count


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "seed", [1223, 3186, 4497, 7119, 7872, 8782, 8822, 64974, 3055, 3547, 4941, 5313, 5821, 6221, 7469, 7589]
)
def test_schedules_that_once_broke_a_rule_break_none(seed: int) -> None:
    assert run_schedule(seed).outcomes.total() == 200


@pytest.mark.parametrize("seed", [235, 11354, 17304, 19888])
def test_schedules_with_drafts_that_prepare_that_once_broke_a_rule_break_none(seed: int) -> None:
    """Poisons with a cut connection or of two kinds, and proposals that overtook the answers to what was prepared."""
    assert run_schedule(seed, 12, draft_ahead=4).outcomes.total() == 12


def test_drafts_that_prepare_break_no_rule() -> None:
    """Under faults of all kinds, in cells that have drafts."""
    results = [run_schedule(seed, 100, draft_ahead=4) for seed in range(6)]
    assert sum(result.ahead_rows for result in results) > 20
    assert sum(result.changes[PREPARED] for result in results) > 1


@pytest.mark.slow
def test_mixed_faults_break_no_rule_and_take_sequences_through_most_changes_of_state() -> None:
    results = [run_schedule(seed) for seed in range(90, 125)]
    outcomes = sum((result.outcomes for result in results), Counter[str]())
    assert sum(result.structured for result in results) > 500
    # Of 200 prompts of about 12 tokens, many begin alike.
    assert sum(result.reused > 500 for result in results) > 10
    # Most sequences finish whatever happens; the other ends are there as well.
    assert outcomes["length"] + outcomes["stop"] > 0.75 * outcomes.total()
    assert {"cancelled", "deadline", "refused queue_full", "refused too_long", "failed", "gateway died"} <= set(
        outcomes
    )
    every = {f"{state.value}: {cause.value}" for state, causes in TRANSITIONS.items() for cause in causes}
    seen = {change for result in results for change in result.changes}
    assert seen <= every
    assert len(seen) > 0.6 * len(every)


def test_a_seed_takes_the_same_course_in_every_process() -> None:
    here = digest(run_schedule(3))
    program = "from tests.sim.test_faults import *; print(digest(run_schedule(3)))"
    there = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert there.stdout.strip() == here
    assert digest(run_schedule(1)) != here


def test_soak_says_how_it_went() -> None:
    arguments = ["--seeds", "2", "--first", "7", "--jobs", "1", "--sequences", "20", "--draft-ahead", "3"]
    command = [sys.executable, "-m", "tests.sim.soak", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "2 schedules in" in run.stdout
    assert ", 0 failures" in run.stdout


def test_a_schedule_that_fails_becomes_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shrink(3, 5, kinds=()) is None
    releases_are_forgotten(monkeypatch)
    report = shrink(3, 20, kinds=())
    assert report is not None
    assert report.count("RequestPlan(") == 1
    assert "seed 3 with 1 sequences" in report
    assert "BROKEN" in report.splitlines()[-1]


def test_only_what_fails_together_is_left() -> None:
    assert list(fewest(range(200), lambda parts: {3, 17, 90} <= set(parts))) == [3, 17, 90]
    assert list(fewest(range(200), lambda _: True)) == []


def test_virtual_time_jumps_and_timers_keep_their_order() -> None:
    loop = VirtualLoop()
    order: list[str] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append(f"{name} at {loop.time():g}")

    async def run() -> None:
        await asyncio.gather(sleeper("a", 3600), sleeper("b", 1), sleeper("c", 3600))

    loop.run_until_complete(run())
    assert order == ["b at 1", "a at 3600", "c at 3600"]

    async def wait_for_nobody() -> None:
        await loop.create_future()

    with pytest.raises(StandstillError, match="nothing is left"):
        loop.run_until_complete(wait_for_nobody())

    def again() -> None:
        loop.call_soon(again)

    again()
    with pytest.raises(StandstillError, match="time does not go on"):
        loop.run_until_complete(wait_for_nobody())
    loop.close()


def test_a_call_on_a_thread_may_end_early_once_another_one_waits() -> None:
    loop = VirtualLoop()
    thread = VirtualThread(loop, lambda *ends: ends)

    async def run(after: float, ends: tuple[float, ...]) -> float:
        await asyncio.sleep(after)
        await thread.submit(lambda *_: None, *ends)
        return loop.time()

    async def ends_of(*calls: tuple[float, tuple[float, ...]]) -> list[float]:
        began = loop.time()
        return [end - began for end in await asyncio.gather(*(run(*call) for call in calls))]

    assert loop.run_until_complete(ends_of((0, (1, 2, 3)))) == [3]
    assert loop.run_until_complete(ends_of((0, (1, 2, 3)), (1.5, (4,)), (1.75, (1,)))) == [2, 6, 7]
    assert loop.run_until_complete(ends_of((0, (5,)), (1, (1, 2, 3)), (2, (1,)))) == [5, 6, 7]
    loop.close()
