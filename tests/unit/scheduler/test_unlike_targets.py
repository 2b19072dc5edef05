"""Targets with several fingerprints in one cell, as in an upgrade: where sequences begin, go on and end."""

from __future__ import annotations

from spool.scheduler.config import KvMovement
from spool.scheduler.messages import EmitTokens, MoveKv, SendStep, SequenceState, WorkerDrained, WorkersSettled
from tests.unit.scheduler.driver import Driver, check_to_the_end, of_type, outputs, prompt_of

OLD, NEW = "of the old release", "of the new one"


def join(driver: Driver, worker_id: str, **more: object) -> None:
    """An old target or a new one, by its name."""
    old = worker_id.startswith("old")
    driver.join(worker_id, fingerprint=OLD if old else NEW, release=() if old else (0, 2), **more)  # type: ignore[arg-type]


def begun_on_old(sequences: int, **config: object) -> Driver:
    """Sequences in the middle of decoding on the target `old-0`."""
    driver = Driver(**{"steps_in_flight": 1, "draft_length": 0, **config})
    join(driver, "old-0")
    for sequence_id in range(1, sequences + 1):
        driver.submit(sequence_id)
    for _ in range(3):
        driver.answer("old-0")
    return driver


def lose(driver: Driver, worker_id: str) -> None:
    """What the worker held and had to answer is gone."""
    driver.lose(worker_id)
    del driver.workers[worker_id], driver.steps[worker_id]


def homes(driver: Driver) -> dict[int, str | None]:
    return {one.sequence_id: one.target_id for one in driver.core.sequences(100)}


def computed_by(driver: Driver, sequence_id: int) -> set[str]:
    """The targets that sampled the sequence's tokens."""
    return {each.target_id for each in of_type(driver.log, EmitTokens) if each.sequence_id == sequence_id}


def test_sequences_end_on_the_last_target_with_their_fingerprint() -> None:
    driver = begun_on_old(3)
    join(driver, "new")
    driver.drain("old-0")
    driver.submit(4)
    assert homes(driver) == {1: "old-0", 2: "old-0", 3: "old-0", 4: "new"}
    check_to_the_end(driver, 1, 2, 3, 4)
    assert [computed_by(driver, number) for number in (1, 2, 3, 4)] == [{"old-0"}] * 3 + [{"new"}]
    assert of_type(driver.log, WorkerDrained) == [WorkerDrained("old-0")]
    assert not of_type(driver.log, MoveKv)


def test_they_leave_for_another_target_with_their_fingerprint_with_their_kv() -> None:
    driver = begun_on_old(3, kv_movement=KvMovement.ALWAYS)
    join(driver, "new")
    join(driver, "old-1")
    driver.drain("old-0")
    check_to_the_end(driver, 1, 2, 3)
    assert {move.destination_id for move in of_type(driver.log, MoveKv)} == {"old-1"}
    assert {worker for number in (1, 2, 3) for worker in computed_by(driver, number)} == {"old-0", "old-1"}


def test_one_that_joins_meanwhile_takes_them() -> None:
    driver = begun_on_old(2)
    driver.drain("old-0")
    driver.answer("old-0")
    join(driver, "old-1")
    check_to_the_end(driver, 1, 2)
    assert computed_by(driver, 1) == computed_by(driver, 2) == {"old-0", "old-1"}


def test_rows_follow_on_a_target_where_sequences_end() -> None:
    driver = begun_on_old(2, steps_in_flight=2)
    join(driver, "new")
    driver.drain("old-0")
    sent = len(of_type(driver.log, SendStep))
    driver.answer("old-0")
    assert any(row.follows for step in of_type(driver.log, SendStep)[sent:] for row in step.rows)
    check_to_the_end(driver, 1, 2)


def test_a_prompt_of_which_nothing_was_answered_goes_anywhere() -> None:
    driver = Driver(steps_in_flight=1, prefill_chunk=4)
    join(driver, "old-0")
    driver.submit(1, prompt_length=4)
    driver.submit(2, prompt_length=4)
    join(driver, "new")
    driver.drain("old-0")
    assert homes(driver) == {1: "old-0", 2: "new"}
    check_to_the_end(driver, 1, 2)


def test_the_last_one_is_lost_and_they_go_on_at_others() -> None:
    driver = begun_on_old(2)
    join(driver, "new")
    before = [len(outputs(driver, number)) for number in (1, 2)]
    lose(driver, "old-0")
    assert homes(driver) == {1: "new", 2: "new"}
    assert min(before) > 0
    check_to_the_end(driver, 1, 2)


def test_those_that_drain_take_no_places_of_others() -> None:
    driver = begun_on_old(2, max_running=2)
    join(driver, "new")
    driver.drain("old-0")
    for number in (3, 4, 5):
        driver.submit(number)
    assert homes(driver) == {1: "old-0", 2: "old-0", 3: "new", 4: "new", 5: None}
    check_to_the_end(driver, 1, 2, 3, 4, 5)


def test_a_sequence_waits_for_its_own_targets_and_others_pass_it() -> None:
    """What came of two old targets does not fit into one of them; no newcomer takes the room that it waits for."""
    driver = Driver(steps_in_flight=1, draft_length=0, max_running=8)
    join(driver, "old-0", pages=16)
    join(driver, "old-1", pages=16)
    for number in (1, 2):
        driver.submit(number, prompt_length=30, max_tokens=12)
    for _ in range(2):
        driver.answer("old-0")
        driver.answer("old-1")
    (stays,) = (number for number, home in homes(driver).items() if home == "old-1")
    returns = 3 - stays
    driver.join("new", pages=16, fingerprint=NEW)  # no release that others would prefer
    lose(driver, "old-0")
    assert homes(driver) == {stays: "old-1", returns: None}
    driver.submit(3, prompt_length=30, max_tokens=12)
    driver.submit(4, prompt_length=2, max_tokens=2)
    driver.submit(5, prompt_length=2, max_tokens=2)
    assert {number: homes(driver)[number] for number in (returns, 3, 4, 5)} == {
        returns: None,
        3: "new",
        4: "new",
        5: "new",
    }
    check_to_the_end(driver, 1, 2, 3, 4, 5)
    assert "new" not in computed_by(driver, returns) | computed_by(driver, stays)


def test_preempted_where_it_ends_a_sequence_comes_back() -> None:
    """Both fit at first, and one must give way later; nothing else runs there again."""
    driver = Driver(steps_in_flight=1, draft_length=0, max_running=2)
    join(driver, "old-0", pages=10)
    driver.submit(1, prompt_length=8, max_tokens=24)
    driver.submit(2, prompt_length=8, max_tokens=24)
    for _ in range(3):
        driver.answer("old-0")
    join(driver, "new")
    driver.drain("old-0")
    check_to_the_end(driver, 1, 2)
    assert driver.core.snapshot().preemptions > 0
    assert computed_by(driver, 1) | computed_by(driver, 2) == {"old-0"}


def test_resubmitted_ones_wait_for_targets_that_may_still_join() -> None:
    driver = Driver(draft_length=0)
    join(driver, "new")
    token = 7
    for number, fingerprint in ((1, OLD), (2, NEW), (3, "")):
        driver.submit(number, committed_output=(token,), admitted_before=True, fingerprint=fingerprint)
    assert homes(driver) == {1: None, 2: "new", 3: "new"}
    join(driver, "old-0")
    assert homes(driver)[1] == "old-0"
    driver.settle()
    assert computed_by(driver, 1) == {"old-0"}


def test_they_do_not_wait_for_ever() -> None:
    driver = Driver(draft_length=0)
    join(driver, "new")
    driver.submit(1, committed_output=(7,), admitted_before=True, fingerprint=OLD)
    assert [one.state for one in driver.core.sequences(1)] == [SequenceState.WAITING]
    driver.handle(WorkersSettled())
    assert homes(driver) == {1: "new"}
    driver.submit(2, committed_output=(7,), admitted_before=True, fingerprint=OLD)
    assert homes(driver)[2] == "new"
    driver.settle()
    assert len(outputs(driver, 1)) == 19


def test_new_sequences_begin_at_the_newest_release_unless_it_is_crowded() -> None:
    """Also one whose prompt an older one knows."""
    driver = Driver(draft_length=0)
    join(driver, "old-0")
    for number in range(1, 7):
        driver.submit(number, prompt_length=9)
    join(driver, "new")
    again = 51
    assert prompt_of(again, 9) == prompt_of(1, 9)
    numbers = [again, *range(52, 64)]
    for number in numbers:
        driver.submit(number, prompt_length=9)
    where = [homes(driver)[number] for number in numbers]
    assert where[:7] == ["new"] * 7
    assert "old-0" in where[7:]
    check_to_the_end(driver, *range(1, 7), *numbers)
