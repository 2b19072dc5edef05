"""Several cells under faults: the gateways' client chooses among them, and goes on in another one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from services.scheduler_client.remote_stream import RemoteStream
from tests.sim.cell.plan import CELL_CRASH, FAULTS, Fault, Plan, make_plan
from tests.sim.cell.schedule import ScheduleError, ScheduleResult, run_plan, run_schedule


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cells", [2, 3])
@pytest.mark.parametrize("first", range(0, 40, 5))
def test_faults_break_no_rule(cells: int, first: int) -> None:
    """Every output is that of plain decoding, nothing is lost, and nothing is left over in any cell."""
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + 5):
        outcomes += run_schedule(seed, cells=cells).outcomes
    assert outcomes["length"] + outcomes["stop"] > 0.5 * outcomes.total()


def test_some_schedules_have_several_cells_and_some_lose_whole_ones() -> None:
    plans = [make_plan(random.Random(seed), seed, 20, FAULTS) for seed in range(200)]
    assert Counter(plan.cells for plan in plans).keys() == {1, 2, 3}
    assert sum(fault.kind == CELL_CRASH for plan in plans for fault in plan.faults) > 5


def run_with_a_poison(seed: int) -> ScheduleResult:
    """Three cells of one target each, and one request that kills each target that computes it."""
    rng = random.Random(seed)
    plan: Plan = make_plan(rng, seed, 60, (), cells=3)
    workers = tuple(worker for worker in plan.workers if worker.worker_id.endswith("target0"))
    return run_plan(replace(plan, workers=workers, faults=(Fault(0.0, "poison", 1.0, 0.5, 0.5),)), rng)


@pytest.mark.parametrize("seed", range(4))
def test_poison_takes_two_targets_in_whatever_cells(seed: int) -> None:
    result = run_with_a_poison(seed)
    died = [event[2] for event in result.events if event[1] == "worker dies"]
    assert len(set(died)) == len(died) == 2
    assert result.outcomes["failed"] == 1


def test_mark_that_stays_in_its_cell_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteStream, "suspect", lambda self, suspicion: None)
    with pytest.raises(ScheduleError, match=r"has killed 3 target workers, 2 may go"):
        run_with_a_poison(1)
