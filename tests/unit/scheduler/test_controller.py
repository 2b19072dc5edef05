"""What is drafted and prepared where the costs of steps are known exactly, and so what is best."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from scheduler.config import Policy
from scheduler.messages import Role, Row, SendStep
from tests.unit.scheduler.driver import Driver, of_type

LONGEST = 6


@dataclass(frozen=True)
class Law:
    """Seconds of steps, and of what is in them."""

    base: float
    row: float
    of_pass: float
    of_token: float

    def seconds(self, step: SendStep) -> float:
        tokens = sum(len(row.tokens) + row.follows + len(row.draft_tokens) for row in step.rows)
        passes = max((row.draft_length for row in step.rows), default=0)
        if step.worker_id == "target":
            return self.base + self.row * tokens + self.of_pass * passes
        drafted = sum(row.draft_length * max(row.outcomes, 1) for row in step.rows)
        return self.of_pass * max(passes, 1) + self.of_token * max(drafted, 1)


def rows_at_last(law: Law, guesses: Mapping[str, float], sequences: int, **config: object) -> dict[str, list[Row]]:
    """Of each worker in the last 100 of 1000 steps in virtual time. `guesses` says how often each draft is right, or
    the head of the target."""
    driver = Driver(**{"policy": Policy.AUTO, "wait_bound_steps": 1.5, "draft_length": LONGEST, **config})
    for name, guess in {"target": 0.0, **guesses}.items():
        role, head = (Role.TARGET, "head" if name in guesses else "") if name == "target" else (Role.DRAFT, "")
        driver.join(name, role, pages=100_000, max_length=100_000, packed=4096, guess=guess, head=head)
    for sequence_id in range(sequences):
        driver.submit(sequence_id, prompt_length=8, max_tokens=50_000)
    ends: list[tuple[float, str, float]] = []
    for _ in range(1000):
        busy = {name for _, name, _ in ends}
        for name, queued in driver.steps.items():
            if queued and name not in busy:
                seconds = law.seconds(queued[0])
                heapq.heappush(ends, (driver.now + seconds, name, seconds))
        deadline = driver.core.next_deadline()
        if deadline is not None and (not ends or deadline < ends[0][0]):
            driver.now = deadline
            driver.plan()
            continue
        driver.now, name, seconds = heapq.heappop(ends)
        driver.answer(name, seconds=seconds)
    found: dict[str, list[Row]] = {name: [] for name in driver.workers}
    for step in of_type(driver.log, SendStep)[-100:]:
        found[step.worker_id] += step.rows
    return found


def test_each_draft_model_has_its_own_acceptance_and_its_own_length() -> None:
    rows = rows_at_last(Law(0.010, 0.003, 0.0008, 0.0001), {"good": 0.97, "poor": 0.05}, 8, batch_size=16)
    lengths = [row.draft_length for row in rows["good"]]
    assert len(lengths) > 50
    assert min(lengths) >= 2
    assert len(rows["poor"]) <= 5, "probes go on"


@pytest.mark.parametrize("shared_device", [False, True])
def test_a_draft_that_takes_the_targets_time_must_gain_more(shared_device: bool) -> None:
    """Two batches take turns: 11 ms of a target and 8 ms of a draft for 1.6 tokens, beside each other or one by one."""
    law = Law(0.010, 0.0002, 0.008, 0.0002)
    rows = rows_at_last(law, {"draft": 0.6}, 8, batch_size=4, shared_device=shared_device)
    assert (len(rows["draft"]) > 50) is not shared_device


@pytest.mark.parametrize(("verification", "length"), [(0.0019, None), (0.0044, 1), (0.0104, 4), (0.1, LONGEST)])
def test_proposals_are_prepared_as_long_as_a_verification_leaves_time_for(
    verification: float, length: int | None
) -> None:
    """Passes of 1 ms, and outcomes that cost as much again."""
    law = Law(verification - 1e-5, 1e-5, 0.001, 0.00001)
    rows = rows_at_last(law, {"draft": 0.9}, 1, policy=Policy.RAGGED, draft_ahead=1000)
    found = {row.draft_length for row in rows["draft"] if row.outcomes}
    assert found == (set() if length is None else {length})


@pytest.mark.parametrize(("guess", "of_pass", "pays"), [(0.9, 0.002, True), (0.0, 0.002, False), (0.9, 0.02, False)])
def test_a_head_is_asked_only_where_it_is_right_and_costs_less_than_it_saves(
    guess: float, of_pass: float, pays: bool
) -> None:
    rows = rows_at_last(Law(0.010, 0.0, of_pass, 0.0), {"target": guess}, 2)["target"]
    asked = sum(row.draft_length for row in rows) / len(rows)
    assert asked > 2.5 if pays else asked < 0.1  # probes go on
