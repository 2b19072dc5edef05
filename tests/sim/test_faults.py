"""Cells of the services' own code under faults, in virtual time: nothing is lost, comes twice or leaks."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from spool.services.scheduler_client.remote_stream import RemoteStream
from tests.sim.cell.plan import DRAFT_FAULTS, DRAFT_POISON, FAULTS, POISON, TRUNCATED, Fault, make_plan
from tests.sim.cell.schedule import ScheduleError, ScheduleResult, run_plan, run_schedule

ROOT = Path(__file__).parents[2]


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
    POISON: (("worker dies",), 2),
    "draft crash": (("worker dies",), 4),
    "draft leaves": (("worker dies",), 4),
    "draft drains": (("worker dies",), 4),
    "draft joins": (("worker starts",), 4),
    DRAFT_POISON: (("worker dies",), 1),
}
"""Events that there are at least so many of in four schedules."""


# First what no other quick test does: KV moves, and arrives damaged.
KINDS = sorted((*FAULTS, DRAFT_POISON, TRUNCATED), key=lambda kind: kind != "kv damaged")


@pytest.mark.sampled(20)
@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_of_fault_breaks_no_rule(kind: str) -> None:
    """And it does what it is for."""
    results = [run_schedule(seed, kinds=(kind,)) for seed in range(4)]
    assert all(result.faults[kind] >= 2 for result in results)
    assert all(result.outcomes.total() == 200 for result in results)
    words, count = WHAT_FAULTS_DO.get(kind, ((), 0))
    assert sum(happened(result, *words) for result in results) >= count


def test_drafts_that_serve_targets_break_no_rule() -> None:
    """Under faults of all kinds, in cells in which every target asks draft workers."""
    results = [run_schedule(seed, 100, served=True) for seed in range(3)]
    assert sum(result.served for result in results) > 150


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_whatever_strikes_drafts_stops_no_target(first: int) -> None:
    """No target is lost or waits, and no sequence fails: the world says so where it happens."""
    results = [run_schedule(seed, 100, DRAFT_FAULTS) for seed in range(first, first + 6)]
    assert sum(result.served for result in results) > 90


@pytest.mark.slow
def test_mixed_faults_break_no_rule() -> None:
    results = [run_schedule(seed) for seed in range(90, 106)]
    outcomes = sum((result.outcomes for result in results), Counter[str]())
    assert sum(result.structured for result in results) > 230
    # Of 200 prompts of about 12 tokens, many begin alike.
    assert sum(result.reused > 500 for result in results) > 4
    # Most sequences finish whatever happens; the other ends are there as well.
    assert outcomes["length"] + outcomes["stop"] > 0.75 * outcomes.total()
    assert {"cancelled", "deadline", "refused queue_full", "refused too_long", "failed", "gateway died"} <= set(
        outcomes
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize("cells", [2, 3])
@pytest.mark.parametrize("first", range(0, 20, 5))
def test_several_cells_under_faults_break_no_rule(cells: int, first: int) -> None:
    """Every output is that of plain decoding, nothing is lost, and nothing is left over in any cell."""
    outcomes = Counter[str]()
    for seed in range(first, first + 2):
        outcomes += run_schedule(seed, cells=cells).outcomes
    assert outcomes["length"] + outcomes["stop"] > 0.5 * outcomes.total()


def run_with_a_poison(seed: int) -> ScheduleResult:
    """Three cells of one target each, and one request that kills each target that computes it."""
    rng = random.Random(seed)
    plan = make_plan(rng, seed, 60, (), cells=3)
    workers = tuple(worker for worker in plan.workers if worker.worker_id.endswith("target0"))
    return run_plan(replace(plan, workers=workers, faults=(Fault(0.0, POISON, 1.0, 0.5, 0.5),)), rng)


@pytest.mark.parametrize("seed", [0, 1, 2, 4])  # of 3 the request's deadline may come first
def test_poison_takes_two_targets_in_whatever_cells(seed: int) -> None:
    result = run_with_a_poison(seed)
    died = [event[2] for event in result.events if event[1] == "worker dies"]
    assert len(set(died)) == len(died) == 2
    assert result.outcomes["failed"] == 1


def test_mark_that_stays_in_its_cell_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteStream, "suspect", lambda self, suspicion: None)
    with pytest.raises(ScheduleError, match=r"has killed 3 target workers, 2 may go"):
        run_with_a_poison(1)


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
