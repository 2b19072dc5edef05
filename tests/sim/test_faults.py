"""Cells of the services' own code under faults, in virtual time: nothing is lost, comes twice or leaks."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.sim.cell.coverage import ALL_CHANGES, PREPARED, never_seen
from tests.sim.cell.plan import FAULTS, HANGING, SPORADIC
from tests.sim.cell.schedule import ScheduleResult, run_schedule
from tests.sim.cell.virtual_time import StandstillError, VirtualLoop, VirtualThread
from tests.sim.soak import Summary, Tally

ROOT = Path(__file__).parents[2]

RUNNING = ("prefilling", "ready", "drafting", "drafted", "verifying", "moving")


def digest(result: ScheduleResult) -> str:
    return hashlib.sha256(repr(result.events).encode()).hexdigest()


def happened(result: ScheduleResult, *words: str) -> int:
    """Events that begin with these words."""
    return sum(event[1 : 1 + len(words)] == words for event in result.events)


@cache
def prepared_schedules() -> list[ScheduleResult]:
    return [run_schedule(seed, draft_ahead=4) for seed in range(8)]


WHAT_FAULTS_DO: dict[str, tuple[tuple[str, ...], int]] = {
    "two schedulers": (("scheduler closed",), 0),
    "scheduler crash": (("scheduler dies",), 6),
    "worker crash": (("worker dies",), 6),
    "worker leaves": (("worker dies",), 6),
    "worker drains": (("worker dies",), 6),
    "gateway crash": (("gateway dies",), 6),
    "lost kv": (("kv lost",), 50),
    HANGING: (("worker hangs",), 3),
    SPORADIC: (("worker dies",), 6),
}
"""Events that there are more of than so many."""
WHO_FAILS = {HANGING: 0, "row trouble": 3}
"""Kinds of faults of which more sequences fail than so many."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", [*FAULTS, HANGING, SPORADIC])
def test_one_kind_of_fault_breaks_no_rule(kind: str) -> None:
    """And it does what it is for."""
    results = [run_schedule(seed, kinds=(kind,)) for seed in range(8)]
    assert all(result.faults[kind] >= 2 for result in results)
    assert all(result.outcomes.total() == 200 for result in results)
    if kind in WHAT_FAULTS_DO:
        words, count = WHAT_FAULTS_DO[kind]
        assert sum(happened(result, *words) for result in results) > count
    if kind in WHO_FAILS:
        assert sum(result.outcomes["failed"] for result in results) > WHO_FAILS[kind]
    if kind == "two schedulers":
        assert sum(result.fenced_replies for result in results) > 0


def test_kinds_of_faults_have_the_names_that_are_looked_for() -> None:
    assert {*WHAT_FAULTS_DO, *WHO_FAILS} <= {*FAULTS, HANGING, SPORADIC}


@pytest.mark.parametrize("seed", [1223, 3186, 4497, 7119, 7872, 8782, 8822, 64974])
def test_schedules_that_found_something_break_no_rule_any_more(seed: int) -> None:
    """A rule, a process of the simulation that could not die, or so many poisons that they take a minute."""
    assert run_schedule(seed).outcomes.total() == 200


@pytest.mark.parametrize("seed", [3055, 3547, 4941, 5313, 5821, 6221, 7469, 7589])
def test_schedules_with_releases_that_counted_as_turns_break_no_rule_any_more(seed: int) -> None:
    """On shared cores, the release of a draft's KV, sent last, must not give the turn to the target afterwards."""
    assert run_schedule(seed).outcomes.total() == 200


@pytest.mark.parametrize("seed", [235, 11354, 17304, 19888])
def test_schedules_with_drafts_that_prepare_that_found_something_break_no_rule_any_more(seed: int) -> None:
    """Poisons beside a cut connection or of two kinds, and proposals that overtook the answers to what was prepared."""
    assert run_schedule(seed, 12, draft_ahead=4).outcomes.total() == 12


@pytest.mark.parametrize("seed", [25, 44])
def test_chunks_of_a_prompt_may_overtake_each_other(seed: int) -> None:
    assert run_schedule(seed, kinds=("duplicate and reorder",)).outcomes.total() == 200


def test_outputs_that_must_follow_a_grammar_break_no_rule() -> None:
    """Under faults of all kinds; the oracle knows nothing of states that are kept from step to step."""
    results = [run_schedule(seed) for seed in (2, 11, 15, 17)]
    assert sum(result.structured for result in results) > 300
    assert sum(result.faults.total() for result in results) > 10


def test_drafts_that_prepare_break_no_rule() -> None:
    """Under faults of all kinds, in cells that have drafts."""
    results = prepared_schedules()
    assert sum(result.ahead_rows for result in results) > 50
    assert sum(result.changes[PREPARED] for result in results) > 5
    assert sum(result.faults.total() for result in results) > 10


@pytest.mark.slow
def test_mixed_faults_break_no_rule_and_take_sequences_through_every_change_of_state() -> None:
    results = [run_schedule(seed) for seed in range(90, 125)]
    outcomes: Counter[str] = Counter()
    sharing = 0
    for result in results:
        outcomes += result.outcomes
        sharing += result.reused > 500
    assert sum(result.structured for result in results) > 500
    # Of 200 prompts of about 12 tokens, many begin alike.
    assert sharing > 17
    # Most sequences finish whatever happens; the other ends are there as well.
    assert outcomes["length"] + outcomes["stop"] > 0.75 * outcomes.total()
    assert {"cancelled", "deadline", "refused queue_full", "refused too_long", "failed", "gateway died"} <= set(
        outcomes
    )
    seen = sum((result.changes for result in [*results, *prepared_schedules()]), Counter[str]())
    assert set(never_seen(seen)) <= NEVER_SEEN.keys()
    assert sum(seen.values()) > 10_000


_DRAFT_GONE = "a draft must be lost, or fail a row, while the target of its sequence drains"
_RARE = "a sequence moves for milliseconds, and seldom"
NEVER_SEEN = {
    "ready: KV missing": _DRAFT_GONE,
    "ready: KV leaves": _DRAFT_GONE,
    "drafting: KV missing": _DRAFT_GONE,
    "drafting: KV leaves": _DRAFT_GONE,
    "moving: KV leaves": "where KV arrives, the next target would have to drain already",
    "moving: draft wanted": _RARE,
    "moving: returned": _RARE,
    "moving: cancel": _RARE,
    "prefilling: error": "only a row that fails while it is prefilled, or a second loss of a target",
    "verifying: error": "only a row that fails while it is verified",
}
"""Changes of state that these schedules do not reach, with the reason of each."""


def test_changes_of_state_are_counted() -> None:
    """In a cell in which nothing goes wrong, each sequence is admitted once and ends once."""
    result = run_schedule(2, kinds=())
    finished = result.outcomes["length"] + result.outcomes["stop"]
    changes = result.changes
    ended = sum(count for name, count in changes.items() if name.endswith(": ended"))
    assert ended == finished
    admitted, returned = changes["waiting: admitted"], sum(changes[f"{state}: returned"] for state in RUNNING)
    assert admitted - returned >= finished
    assert changes["drafted: verify sent"] >= changes["verifying: ended"] > 0
    assert "waiting: admitted" not in never_seen(changes)
    assert set(never_seen(changes)) == {name for name in ALL_CHANGES if name not in changes}
    assert never_seen({}) == list(ALL_CHANGES)


def test_a_seed_takes_the_same_course_in_every_process() -> None:
    seed = 3
    here = digest(run_schedule(seed))
    assert digest(run_schedule(seed)) == here
    program = f"from tests.sim.test_faults import *; print(digest(run_schedule({seed})))"
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


def test_two_seeds_take_two_courses() -> None:
    assert digest(run_schedule(1)) != digest(run_schedule(2))


def test_soak_says_how_it_went(tmp_path: Path) -> None:
    summary = tmp_path / "soak.json"
    arguments = ["--seeds", "4", "--first", "7", "--jobs", "1", "--sequences", "50", "--draft-ahead", "3"]
    arguments += ["--json", str(summary)]
    command = [sys.executable, "-m", "tests.sim.soak", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "4 schedules in" in run.stdout
    assert "0 failures" in run.stdout
    said = json.loads(summary.read_text(encoding="utf-8"))
    assert (said["first_seed"], said["next_seed"], said["schedules"], said["sequences"]) == (7, 11, 4, 200)
    assert said["failures"] == []
    assert sum(said["ends"].values()) == 200
    results = [run_schedule(seed, 50, draft_ahead=3) for seed in range(7, 11)]
    assert said["faults"] == sum((result.faults for result in results), Counter())
    seen = sum((result.changes for result in results), Counter[str]())
    assert said["changes_of_state"] == {
        "in_table": len(ALL_CHANGES),
        "seen": seen,
        "never_seen": [name for name in ALL_CHANGES if name not in seen],
    }
    assert f"{len(seen)} of {len(ALL_CHANGES)} changes of state were seen" in run.stdout
    assert said["ahead_rows"] == sum(result.ahead_rows for result in results) > 0
    assert said["ahead_schedules"] == sum(result.ahead_rows > 0 for result in results)
    assert said["prepared_rounds"] == seen[PREPARED]
    assert said["events"] == sum(len(result.events) for result in results)
    assert list(tmp_path.iterdir()) == [summary]


def test_summary_counts_only_up_to_the_first_seed_that_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"

    def next_seed() -> int:
        summary.write()
        return int(json.loads(file.read_text(encoding="utf-8"))["next_seed"])

    summary = Summary(file, 10, 2)
    summary.add(range(15, 20), Tally(schedules=5))
    assert next_seed() == 10
    summary.add(range(10, 15), Tally(schedules=5))
    assert next_seed() == 20


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
