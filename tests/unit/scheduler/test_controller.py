"""What is drafted where the costs of steps are known exactly, and so what is best."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from spool.scheduler.config import Policy
from spool.scheduler.messages import DraftingReport, Role, SendStep
from tests.unit.scheduler.driver import Driver, of_type

LONGEST = 6


@dataclass(frozen=True)
class Law:
    """Seconds of a target's steps: by themselves, and for each token. Proposals take `of_pass` for each token of the
    longest, `of_token` for each token of all, and `of_start` for each sequence for which none was made in the step
    before: a target that proposes itself spends that time, and a draft worker lets its target wait for so long. In
    steps with a number of `found`, of each ten, they are found in the text, and take no time."""

    base: float
    row: float
    of_pass: float
    of_token: float = 0.0
    of_start: float = 0.0
    found: tuple[int, ...] = ()

    def computing(self, step: SendStep, served: bool) -> float:
        tokens = sum(row.end - row.kv_len + served * row.verify for row in step.rows)
        return self.base + self.row * tokens

    def proposing(self, step: SendStep, before: set[int]) -> float:
        """After a step with proposals for the sequences `before`, which are those of this one from then on."""
        lengths = {row.sequence_id: row.verify for row in step.rows if row.verify}
        starting = lengths.keys() - before
        before.clear()
        before.update(lengths)
        if step.step_id % 10 in self.found:
            return 0.0
        seconds = self.of_pass * max(lengths.values(), default=0) + self.of_token * sum(lengths.values())
        return seconds + self.of_start * len(starting)


def run(
    law: Law,
    guesses: Mapping[str, float],
    draft: bool,
    sequences: int,
    max_tokens: int = 50_000,
    steps: int = 400,
    **config: object,
) -> Driver:
    """So many steps in virtual time, or until all sequences have ended. `guesses` says of each target how often what
    is proposed to it is right: by a head of its own, or by a draft worker that serves no other."""
    driver = Driver(**{"policy": Policy.AUTO, "wait_bound_steps": 1.5, "draft_length": LONGEST, **config})
    for name, guess in guesses.items():
        if draft:
            driver.join(f"draft of {name}", Role.DRAFT)
        driver.join(name, pages=100_000, max_length=100_000, packed=4096, guess=guess, head="" if draft else name)
    for sequence_id in range(sequences):
        driver.submit(sequence_id, prompt_length=8, max_tokens=max_tokens)
    before: dict[str, set[int]] = {name: set() for name in guesses}
    ends: list[tuple[float, str, float, float]] = []
    for _ in range(steps):
        busy = {name for _, name, _, _ in ends}
        for name, queued in driver.steps.items():
            if queued and name not in busy:
                heapq.heappush(ends, begin(driver, law, name, before[name]))
        if not ends:
            break
        driver.now, name, seconds, drafting_seconds = heapq.heappop(ends)
        report = None
        if driver.steps[name][0].grant is not None:
            asked = sum(row.verify > 0 for row in driver.steps[name][0].rows)
            report = DraftingReport(True, asked, asked if driver.workers[name].served else 0)
        driver.answer(name, seconds=seconds, report=report, drafting_seconds=drafting_seconds)
    return driver


def begin(driver: Driver, law: Law, name: str, before: set[int]) -> tuple[float, str, float, float]:
    """When the target's next step ends, the target, how long the step takes, and how much of that for proposals."""
    step = driver.steps[name][0]
    proposing, served = law.proposing(step, before), True
    if step.grant is not None and proposing > step.wait_seconds:
        proposing, served = step.wait_seconds, False
    driver.workers[name].served = served
    seconds = law.computing(step, served) + proposing
    return driver.now + seconds, name, seconds, proposing


def verified_at_last(driver: Driver, name: str) -> float:
    """Tokens that a row of the target may verify, on average over its last 100 steps."""
    steps = [step for step in of_type(driver.log, SendStep) if step.worker_id == name][-100:]
    rows = [row for step in steps for row in step.rows]
    return sum(row.verify for row in rows) / len(rows)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(("guess", "of_pass", "pays"), [(0.9, 0.002, True), (0.0, 0.002, False), (0.9, 0.02, False)])
def test_proposals_are_asked_for_only_where_they_save_more_than_they_cost(
    guess: float, of_pass: float, pays: bool, draft: bool
) -> None:
    driver = run(Law(0.010, 0.0, of_pass), {"target": guess}, draft, 2, steps=400 if pays else 1000)
    asked = verified_at_last(driver, "target")
    assert asked > 2.5 if pays else asked < 0.1  # probes go on


@pytest.mark.parametrize("draft", [False, True])
def test_each_draft_model_has_its_own_acceptance_and_its_own_length(draft: bool) -> None:
    driver = run(Law(0.010, 0.003, 0.0008), {"good": 0.97, "poor": 0.05}, draft, 8, batch_size=16)
    assert verified_at_last(driver, "good") > 1.9
    assert verified_at_last(driver, "poor") < 0.1


REGIMES = {
    "passes cost": Law(0.010, 0.0002, 0.006),
    "passes cost little": Law(0.010, 0.0002, 0.001),
    "tokens cost": Law(0.010, 0.0002, 0.0, of_token=0.003),
    "tokens to verify cost": Law(0.010, 0.003, 0.001),
    "first proposals cost": Law(0.010, 0.0002, 0.001, of_start=0.005),
    "some are found": Law(0.010, 0.0002, 0.010, found=(0, 1, 2)),
    "most are found": Law(0.010, 0.0002, 0.010, found=(0, 1, 2, 3, 4, 5, 6, 7)),
    "nothing costs": Law(0.010, 0.0002, 0.0),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("guess", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("regime", REGIMES)
def test_96_tokens_take_hardly_longer_than_with_the_best_fixed_length(
    regime: str, sequences: int, guess: float
) -> None:
    """All that is tried to learn the costs is part of the time."""

    def seconds(policy: Policy, longest: int) -> float:
        driver = run(REGIMES[regime], {"target": guess}, False, sequences, 96, policy=policy, draft_length=longest)
        assert not driver.steps["target"]
        return driver.now

    auto = seconds(Policy.AUTO, LONGEST)
    assert auto < seconds(Policy.RAGGED, 0) / 0.88
    assert auto < min(seconds(Policy.RAGGED, length) for length in range(1, LONGEST + 1)) / 0.8


@dataclass(frozen=True)
class SlowStart(Law):
    """Proposals take 1.7 times as long in the first steps."""

    def proposing(self, step: SendStep, before: set[int]) -> float:
        return super().proposing(step, before) * (1.7 if step.step_id < 50 else 1.0)


def test_a_first_impression_of_many_proposals_does_not_stay() -> None:
    law = SlowStart(0.010, 0.0002, 0.0005, of_token=0.0003)
    driver = run(law, {"target": 0.9}, False, 16, batch_size=16)
    assert verified_at_last(driver, "target") > 1.5


@pytest.mark.parametrize(("before", "after"), [(0.02, 0.001), (0.001, 0.02)])
def test_another_draft_worker_of_the_same_model_is_tried_anew(before: float, after: float) -> None:
    """It may be faster or slower than the one before it."""
    driver = Driver(policy=Policy.AUTO, wait_bound_steps=3.0, draft_length=LONGEST)
    driver.join("target", pages=100_000, max_length=100_000)
    driver.submit(0, max_tokens=50_000)
    for name, of_pass in (("first", before), ("second", after)):
        driver.join(name, Role.DRAFT)
        if name == "second":
            driver.lose("first")
        proposed = set[int]()
        for _ in range(80):
            _, _, seconds, drafting_seconds = begin(driver, Law(0.010, 0.0, of_pass), "target", proposed)
            driver.answer("target", seconds=seconds, drafting_seconds=drafting_seconds)
        last = of_type(driver.log, SendStep)[-10:]
        assert (max(row.verify for step in last for row in step.rows) > 1) == (of_pass < 0.01)


def test_no_step_waits_for_longer_than_its_proposals_may_gain() -> None:
    """A draft that stops answering when it was worth the most: 7 tokens in the time of one."""
    driver = run(Law(0.010, 0.0, 0.0), {"target": 1.0}, True, 1)
    assert verified_at_last(driver, "target") > LONGEST - 0.5
    waits = [step.wait_seconds for step in of_type(driver.log, SendStep)][-100:]
    assert max(waits) <= 0.010 * LONGEST * 1.01
    driver.workers["target"].served = False
    lost = 0.0
    for _ in range(300):
        step = driver.steps["target"][0]
        lost += step.wait_seconds
        asked = sum(row.verify > 0 for row in step.rows)
        late = DraftingReport(True, asked, 0)
        driver.answer("target", None, 0.010 + step.wait_seconds, late, drafting_seconds=step.wait_seconds)
    # Soon nothing is asked of it but probes. (A real target waits in ever fewer of these steps.)
    assert verified_at_last(driver, "target") < 0.1
    assert lost < 100 * 0.010 * LONGEST
    driver.workers["target"].served = True
    for _ in range(300):
        driver.answer("target", seconds=0.010)
    assert verified_at_last(driver, "target") > LONGEST - 1


@pytest.mark.parametrize("policy", [Policy.RAGGED, Policy.EQSPEC, Policy.EXSPEC])
def test_where_lengths_are_given_a_step_waits_for_as_long_as_sequences_may(policy: Policy) -> None:
    driver = Driver(policy=policy, draft_length=2, wait_bound_steps=3.0)
    driver.join("target")
    driver.join("draft", Role.DRAFT)
    driver.submit(1, max_tokens=100)
    for _ in range(20):
        driver.answer("target", seconds=0.02)
    step = driver.steps["target"][0]
    assert step.rows[0].verify == 2
    assert step.wait_seconds == pytest.approx(0.06, rel=0.1)


def test_who_proposes_in_the_target_itself_is_not_waited_for() -> None:
    driver = run(Law(0.010, 0.0, 0.001), {"target": 0.9}, False, 2, steps=100)
    assert not any(step.wait_seconds for step in of_type(driver.log, SendStep))


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("of_pass", [0.0, 0.05])
def test_a_sequence_drafts_from_the_first_as_those_before_it_did(of_pass: float, cancelled: bool) -> None:
    law, driver, before = Law(0.010, 0.0, of_pass), Driver(policy=Policy.AUTO, draft_length=LONGEST), set[int]()
    driver.join("target", head="head")
    for sequence_id in range(8):
        # Before the last row of some of these, one token is left: nothing can be proposed.
        driver.submit(sequence_id, prompt_length=8, max_tokens=70 + sequence_id)
        for count in itertools.count():
            _, _, seconds, drafting_seconds = begin(driver, law, "target", before)
            if cancelled and count == 16:
                driver.cancel(sequence_id)
            driver.answer("target", seconds=seconds, drafting_seconds=drafting_seconds)
            if not driver.steps["target"]:
                break
    openings = [row for step in of_type(driver.log, SendStep) for row in step.rows if row.opening is not None]
    asked = [row.draft_length for row in openings]
    assert asked == [1] + [0 if of_pass else LONGEST] * 7  # the first one tries it
