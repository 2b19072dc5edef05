"""What kills mutants that unit tests let live: examples of the core simulation, and whole cells under faults.

No file of tests that pytest finds by itself: `python -m tests.mutants` names it. These are the same simulations as
those of tests/sim, in parts that are small enough to stop at the first that fails.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings

from tests.sim.cell.schedule import run_schedule
from tests.sim.test_core_simulation import Scenario, build, scenarios

SEEDS = tuple(random.Random("schedules").sample(range(1000), 12))


@settings(max_examples=60)
@given(scenarios)
def test_core(scenario: Scenario) -> None:
    simulation = build(scenario)
    simulation.run()
    simulation.check_end()


@pytest.mark.parametrize("seed", SEEDS)
def test_cell_under_faults(seed: int) -> None:
    assert run_schedule(seed).outcomes.total() == 200
