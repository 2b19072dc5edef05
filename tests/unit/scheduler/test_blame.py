"""A row that kills its worker, makes it hang or fails its step takes two workers at most, and nobody else's answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from scheduler.config import Policy
from scheduler.messages import (
    FailSequence,
    FinishSequence,
    Role,
    Row,
    RowResult,
    RowStatus,
    SendStep,
    SequenceRequest,
    StepCompleted,
    SuspectSequence,
    WorkerLost,
)
from tests.unit.scheduler.driver import Driver, of_type, outputs
from tests.unit.scheduler.model_worker import plain_decoding

SEQUENCES = 12
Deadly = Callable[[Row], bool]


class Cell:
    """Targets and drafts that come anew when they are lost. A step with a deadly row is its worker's last one."""

    def __init__(self, policy: Policy, targets: int, drafts: int = 1, on_draft: bool = False) -> None:
        self.driver = Driver(policy=policy, max_running=10, batch_size=4, draft_length=3)
        self.on_draft = on_draft
        self.lost: list[str] = []
        self._names = itertools.count()
        for role, count in ((Role.TARGET, targets), (Role.DRAFT, drafts)):
            for _ in range(count):
                self._join(role)

    def _join(self, role: Role) -> None:
        self.driver.join(f"{role.value}-{next(self._names)}", role)

    def run(self, deadly: Deadly, seed: int = 0) -> None:
        """Answers steps of random workers until nothing is left to answer."""
        rng, driver = random.Random(seed), self.driver
        for _ in range(20_000):
            ready = [worker_id for worker_id, steps in driver.steps.items() if steps]
            if not ready and not driver.moves:
                return
            driver.now += 0.01
            if not ready or rng.random() < 0.1:
                driver.answer_moves()
                continue
            worker_id = rng.choice(ready)
            step = driver.steps[worker_id][0]
            self.check_alone(worker_id)
            is_draft = worker_id.startswith("draft")
            if is_draft == self.on_draft and any(deadly(row) for row in step.rows):
                self.lose(worker_id)
            else:
                driver.answer(worker_id)
        raise AssertionError("no end")

    @property
    def target(self) -> str:
        """The only target."""
        (target,) = [name for name in self.driver.steps if name.startswith("target")]
        return target

    def lose(self, worker_id: str) -> None:
        self.lost.append(worker_id)
        del self.driver.steps[worker_id], self.driver.workers[worker_id]
        self.driver.handle(WorkerLost(worker_id, "it died"))
        self._join(Role.DRAFT if worker_id.startswith("draft") else Role.TARGET)

    def check_alone(self, worker_id: str) -> None:
        """A suspect shares a target with no other row."""
        if self.driver.core.has_suspect(worker_id):
            assert len([row for step in self.driver.outstanding(worker_id) for row in step.rows]) == 1

    def check_answers(self, *wrong: int) -> None:
        """Those of all but the `wrong` sequences are as plain decoding has them."""
        log = self.driver.log
        for request in self.requests.values():
            tokens = outputs(self.driver, request.sequence_id)
            expected = plain_decoding(request)[0]
            if request.sequence_id in wrong:
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
        failed = [one.sequence_id for one in of_type(log, FailSequence)]
        finished = [one.sequence_id for one in of_type(log, FinishSequence)]
        assert sorted(failed) == sorted(wrong)
        assert sorted(finished + failed) == sorted(self.requests)

    @property
    def requests(self) -> dict[int, SequenceRequest]:
        steps = of_type(self.driver.log, SendStep)
        return {row.sequence_id: row.opening for step in steps for row in step.rows if row.opening is not None}

    def submit(self, count: int = SEQUENCES) -> None:
        for sequence_id in range(count):
            self.driver.submit(sequence_id, prompt_length=2 + sequence_id % 5, max_tokens=15)


def always(sequence_id: int) -> Deadly:
    return lambda row: row.sequence_id == sequence_id


def test_those_beside_it_share_steps_again() -> None:
    cell = Cell(Policy.RAGGED, 1)
    cell.submit()
    cell.run(always(0))
    log = cell.driver.log
    last = of_type(log[log.index(of_type(log, FailSequence)[0]) :], SendStep)
    assert max(step.group.rows for step in last if step.group is not None) == 4
    assert 0 not in {row.sequence_id for step in last for row in step.rows}


@pytest.mark.parametrize("blameless", [True, False])
def test_a_worker_that_leaves_blames_nobody(blameless: bool) -> None:
    cell = Cell(Policy.RAGGED, 1)
    cell.submit(4)
    target = cell.target
    assert cell.driver.outstanding(target)
    del cell.driver.steps[target], cell.driver.workers[target]
    cell.driver.handle(WorkerLost(target, "it was removed", blameless))
    assert bool(of_type(cell.driver.log, SuspectSequence)) is not blameless


def test_a_row_that_kills_drafts_now_and_then_kills_ever_seldomer() -> None:
    cell = Cell(Policy.RAGGED, 1, drafts=2, on_draft=True)
    cell.driver.submit(7, prompt_length=3, max_tokens=200, draft_length=3)
    seen = itertools.count(1)
    cell.run(lambda row: next(seen) % 3 == 0)
    # At most 200 proposals: the losses ask for 1, 2, 4 ... of them, and the last comes too soon.
    assert 2 <= len(cell.lost) <= 2 + (200).bit_length()
    rest = next(seen)
    assert rest - 1 == 3 * len(cell.lost)  # no draft has seen it since
    cell.check_answers()


def failing_whole(cell: Cell, worker_id: str) -> None:
    step = cell.driver.steps[worker_id].pop(0)
    for row in step.rows:
        cell.driver.workers[worker_id].forget(row.sequence_id)
    results = tuple(RowResult(row.sequence_id, RowStatus.FAILED, 0, 0, error="the step broke") for row in step.rows)
    cell.driver.handle(StepCompleted(worker_id, step.step_id, results, 0.01))


@pytest.mark.parametrize("on_draft", [False, True])
def test_a_row_that_fails_its_whole_step_fails_alone(on_draft: bool) -> None:
    cell = Cell(Policy.RAGGED, 1, on_draft=on_draft)
    for sequence_id in range(SEQUENCES):
        cell.driver.submit(sequence_id, prompt_length=2 + sequence_id % 5, max_tokens=15, draft_length=3)
    driver, failures = cell.driver, 0
    while ready := [worker_id for worker_id, steps in driver.steps.items() if steps]:
        for worker_id in ready:
            driver.now += 0.01
            cell.check_alone(worker_id)
            poisoned = any(row.sequence_id == 4 for row in driver.steps[worker_id][0].rows)
            if poisoned and worker_id.startswith("draft") == on_draft:
                failures += 1
                failing_whole(cell, worker_id)
            else:
                driver.answer(worker_id)
    cell.check_answers(*([] if on_draft else [4]))
    assert failures <= (3 if on_draft else 2)
