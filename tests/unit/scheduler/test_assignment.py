"""Which draft worker serves which target, and when a target gets another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from spool.scheduler.messages import DraftGrant, DraftingReport, Role, SendStep, WorkerDrained
from tests.unit.scheduler.driver import Driver, check_to_the_end, of_type

CUT_OFF = DraftingReport(connected=False)
LATE = DraftingReport(True, 4, 0)
GOOD = DraftingReport(True, 4, 1)


def cell(targets: Iterable[str], drafts: Iterable[str]) -> Driver:
    driver = Driver(draft_length=2)
    for name in targets:
        driver.join(name)
    for name in drafts:
        driver.join(name, Role.DRAFT)
    return driver


def grants(driver: Driver) -> dict[str, DraftGrant | None]:
    """Of each target, in its last step."""
    return {step.worker_id: step.grant for step in of_type(driver.log, SendStep)}


def served_by(driver: Driver) -> dict[str, str | None]:
    return {target: None if grant is None else grant.draft_id for target, grant in grants(driver).items()}


def until_told(driver: Driver, target: str) -> str | None:
    """Who serves the target, as its next steps say."""
    for _ in range(2):
        driver.answer(target)
    return served_by(driver)[target]


def run(driver: Driver, target: str, *reports: DraftingReport, seconds: float = 0.01) -> str | None:
    """Answers a step with each of the reports, and returns who serves the target then."""
    for report in reports:
        driver.now += seconds
        driver.answer(target, report=report)
    return until_told(driver, target)


def test_every_step_says_who_serves_the_target_and_only_one_with_its_own_draft_is_served_by_none() -> None:
    driver = cell("tu", "d")
    driver.join("own", head="head")
    for number in range(6):
        driver.submit(number)
    assert served_by(driver) == {"t": "d", "u": "d", "own": None}
    given = grants(driver)
    check_to_the_end(driver, *range(6))
    assert grants(driver) == given


def test_running_sequences_are_balanced_over_drafts_when_one_joins_or_goes() -> None:
    driver = cell("tuvwxy", "d")
    for number in range(24):
        driver.submit(number, max_tokens=200)
    driver.join("e", Role.DRAFT)
    driver.join("f", Role.DRAFT)
    for target in "tuvwxy":
        until_told(driver, target)
    # No draft has more than twice the load of another one; the third is not worth more moves than that.
    counts = Counter(served_by(driver).values())
    assert set(counts) == {"d", "e", "f"}
    assert max(counts.values()) <= 2 * min(counts.values())
    snapshot = {worker.worker_id: worker.sequences for worker in driver.core.snapshot().workers}
    assert [snapshot[name] for name in "def"] == [4 * counts[name] for name in "def"]
    driver.lose("e")
    for target in "tuvwxy":
        until_told(driver, target)
    assert Counter(served_by(driver).values()).keys() == {"d", "f"}


def test_a_target_without_any_draft_gets_the_first_that_joins_and_each_grant_has_a_higher_number() -> None:
    driver = cell("t", "")
    driver.submit(1, max_tokens=400)
    assert grants(driver)["t"] is None
    numbers = []
    for _ in range(3):
        driver.join("d", Role.DRAFT)
        assert until_told(driver, "t") == "d"
        grant = grants(driver)["t"]
        assert grant is not None
        numbers.append(grant.number)
        driver.lose("d")
        assert until_told(driver, "t") is None
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("complaint", [[CUT_OFF], [LATE] * 3])
def test_a_target_that_is_served_badly_gets_another_draft_at_most_every_five_seconds(
    complaint: list[DraftingReport],
) -> None:
    driver = cell("t", "de")
    driver.submit(1, max_tokens=900)
    assert run(driver, "t", *complaint) == "d"  # it was granted just now
    driver.now += 5
    assert run(driver, "t", *complaint) == "e"
    assert run(driver, "t", *complaint) == "e"
    driver.now += 5
    assert run(driver, "t", *complaint) == "d"


@pytest.mark.parametrize("reports", [[LATE, LATE, GOOD, LATE, LATE], [DraftingReport()] * 9, [GOOD] * 9])
def test_a_draft_that_is_late_now_and_then_stays(reports: list[DraftingReport]) -> None:
    driver = cell("t", "de")
    driver.submit(1, max_tokens=900)
    driver.now += 6
    assert run(driver, "t", *reports) == "d"


def test_a_draft_that_targets_have_left_gets_some_again_after_a_while() -> None:
    driver = cell("tu", "de")
    for number in range(4):
        driver.submit(number, max_tokens=900)
    left = served_by(driver)["t"]
    driver.now += 5
    run(driver, "t", CUT_OFF)
    assert len(set(served_by(driver).values())) == 1
    for _ in range(7):
        driver.now += 10
        run(driver, "t", GOOD)
        run(driver, "u", GOOD)
    assert left in served_by(driver).values()
    assert len(set(served_by(driver).values())) == 2


def test_loads_are_not_balanced_by_a_target_that_has_just_left_its_draft() -> None:
    """Else it would be back at once, if the time for balance has come."""
    driver = cell("tuv", "de")
    for number in range(7):
        driver.submit(number, max_tokens=900)
    left, other = served_by(driver)["t"], served_by(driver)["u"]
    assert (left, other) == ("e", "d")
    driver.now += 100
    assert run(driver, "t", CUT_OFF) == other
    driver.now += 4
    assert run(driver, "t", GOOD) == other
    # The others take its place.
    assert [until_told(driver, name) for name in "uv"] == [left, left]


def test_the_only_draft_stays_whatever_the_target_reports() -> None:
    driver = cell("t", "d")
    driver.submit(1, max_tokens=900)
    before = grants(driver)
    assert run(driver, "t", *[CUT_OFF] * 5, seconds=6.0) == "d"
    assert grants(driver) == before


def test_a_report_on_a_draft_that_was_replaced_says_nothing_of_the_next() -> None:
    driver = cell("t", "de")
    driver.submit(1, max_tokens=900)
    driver.lose("d")
    driver.now += 6
    # Both steps in flight were sent with the grant for the draft that is gone.
    driver.join("d", Role.DRAFT)
    driver.answer("t", report=CUT_OFF)
    driver.answer("t", report=CUT_OFF)
    assert served_by(driver)["t"] == "e"


def test_a_draining_draft_goes_once_no_step_in_flight_lets_a_target_ask_it() -> None:
    driver = cell("tu", "de")
    for number in (1, 2):
        driver.submit(number, max_tokens=100)
    assert served_by(driver) == {"t": "e", "u": "d"}
    assert not of_type(driver.drain("d"), WorkerDrained)
    assert not of_type(driver.answer("u"), WorkerDrained)
    assert of_type(driver.answer("u"), WorkerDrained) == [WorkerDrained("d")]
    assert served_by(driver) == {"t": "e", "u": "e"}
    # The next one leaves as well, and nobody is left.
    driver.drain("e")
    assert [until_told(driver, name) for name in "tu"] == [None, None]
    assert of_type(driver.log, WorkerDrained) == [WorkerDrained("d"), WorkerDrained("e")]
    check_to_the_end(driver, 1, 2)


def test_a_draining_draft_without_busy_targets_goes_at_once() -> None:
    driver = cell("t", "d")
    driver.submit(1)
    check_to_the_end(driver, 1)
    assert of_type(driver.drain("d"), WorkerDrained) == [WorkerDrained("d")]
    driver.join("e", Role.DRAFT)
    driver.submit(2)
    assert served_by(driver) == {"t": "e"}


def test_a_hung_target_stops_neither_others_nor_their_drafts() -> None:
    """It keeps its own sequences, and the others go on."""
    driver = cell("tu", "d")
    for number in range(6):
        driver.submit(number, max_tokens=20)
    hung = {one.sequence_id for one in driver.core.sequences(10) if one.target_id == "t"}
    driver.settle("u")
    left = {one.sequence_id for one in driver.core.sequences(10)}
    assert left == hung
    driver.drain("d")
    driver.join("e", Role.DRAFT)
    driver.submit(9)
    driver.submit(10)
    driver.settle("u")
    assert {9, 10} - {one.sequence_id for one in driver.core.sequences(10)}
