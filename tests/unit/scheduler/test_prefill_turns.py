"""Whose prompt the next chunk is of, and which step it rides in."""

from __future__ import annotations

from scheduler.key_class import KeyClass
from scheduler.messages import Row, RowResult, RowStatus, SendStep, StepCompleted
from tests.unit.scheduler.driver import Driver, expected, of_type, outputs

KEYS = (KeyClass("flood"), KeyClass("other"), KeyClass("third"))


def driver_of(keys: tuple[KeyClass, ...] = KEYS) -> Driver:
    driver = Driver(keys=keys, prefill_chunk=10, steps_in_flight=1)
    driver.join("target", pages=10_000)
    return driver


def chunks(driver: Driver) -> list[int]:
    """The sequences of all rows that fed a prompt, in their order."""
    return [
        row.sequence_id
        for step in of_type(driver.log, SendStep)
        for row in step.rows
        if len(row.tokens) > 1 or row.opening is not None
    ]


def test_keys_that_come_together_take_turns_whatever_each_has() -> None:
    driver = driver_of()
    for number in range(4):
        driver.submit(number, prompt_length=40, max_tokens=1, key="flood")
    driver.submit(10, prompt_length=30, max_tokens=1, key="other")
    driver.submit(20, prompt_length=20, max_tokens=1, key="third")
    driver.settle()
    # The first chunk was sent before the others came.
    assert chunks(driver) == [0, 10, 20, 0, 10, 20, 0, 10, 0, *[1] * 4, *[2] * 4, *[3] * 4]


def test_of_one_key_the_older_prompt_is_computed_first() -> None:
    driver = driver_of(())
    for number in range(3):
        driver.submit(number, prompt_length=30, max_tokens=1)
    driver.settle()
    assert chunks(driver) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_what_is_left_of_a_chunk_goes_to_the_next_key() -> None:
    driver = driver_of()
    driver.submit(0, prompt_length=14, max_tokens=1, key="flood")
    driver.submit(1, prompt_length=14, max_tokens=1, key="flood")
    driver.submit(10, prompt_length=10, max_tokens=1, key="other")
    driver.answer("target")  # 10 of sequence 0
    driver.answer("target")  # 10 of sequence 10, whose turn it is
    (step,) = driver.steps["target"]
    assert [(row.sequence_id, len(row.tokens)) for row in step.rows] == [(0, 4), (1, 6)]


def flooded(chunks_before: int) -> Driver:
    """A key with prompts of 1000 tokens has been fed so many chunks."""
    driver = driver_of()
    for number in range(8):
        driver.submit(number, prompt_length=1000, max_tokens=1, key="flood")
    for _ in range(chunks_before):
        driver.answer("target")
    return driver


def test_a_prompt_of_a_key_that_asks_seldom_is_fed_without_a_break() -> None:
    driver = flooded(chunks_before=20)
    for number in range(10, 13):
        driver.submit(number, prompt_length=40, max_tokens=1, key="other")
        before = len(chunks(driver))
        for _ in range(20):
            driver.answer("target")
        after = chunks(driver)[before:]
        assert after[:4] == [number] * 4
        assert set(after[4:]) <= set(range(8))


def test_what_a_key_has_saved_up_is_bounded() -> None:
    """Eight chunks; then the keys take turns, and over time none gets more than the other."""
    driver = flooded(chunks_before=300)
    driver.submit(10, prompt_length=2000, max_tokens=1, key="other")
    before = len(chunks(driver))
    for _ in range(100):
        driver.answer("target")
    turns = [sequence_id == 10 for sequence_id in chunks(driver)[before:]]
    assert turns[:8] == [True] * 8
    assert abs(sum(turns[10:]) - len(turns[10:]) / 2) <= 1


def test_keys_that_have_prompts_waiting_are_fed_by_weight() -> None:
    driver = driver_of((KeyClass("chat", weight=3.0), KeyClass("batch")))
    for number in range(2):
        driver.submit(number, prompt_length=2000, max_tokens=1, key="batch")
        driver.submit(10 + number, prompt_length=2000, max_tokens=1, key="chat")
    for _ in range(200):
        driver.answer("target")
    fed = [sequence_id >= 10 for sequence_id in chunks(driver)[20:180]]
    assert sum(fed) == 120


def busy() -> Driver:
    """Two sequences decode, each in every other step, of which two are always in flight."""
    driver = Driver(batch_size=1, draft_length=0, prefill_chunk=10, steps_in_flight=2)
    driver.join("target")
    for number in range(2):
        driver.submit(number, max_tokens=200)
    for _ in range(6):
        driver.answer("target")
    assert [[row.sequence_id for row in step.rows] for step in driver.outstanding("target")] in ([[0], [1]], [[1], [0]])
    return driver


def steps_with(driver: Driver, sequence_id: int) -> list[bool]:
    return [any(row.sequence_id == sequence_id for row in step.rows) for step in of_type(driver.log, SendStep)]


def test_chunks_of_a_prompt_ride_in_consecutive_steps_beside_others() -> None:
    """Where they waited for each other's answers, they would ride in every other step."""
    driver = busy()
    before = len(steps_with(driver, 10))
    driver.submit(10, prompt_length=35, max_tokens=1)
    while not outputs(driver, 10):
        driver.answer("target")
    assert steps_with(driver, 10)[before:][:5] == [True, True, True, True, False]
    assert outputs(driver, 10) == expected(driver, 10)


def test_a_chunk_behind_another_is_no_reason_for_a_step() -> None:
    """Sequences that are verified beside the first would miss that step."""
    driver = Driver(batch_size=4, draft_length=0, prefill_chunk=10, steps_in_flight=2)
    driver.join("target")
    driver.submit(0, max_tokens=50)
    driver.answer("target")
    driver.submit(10, prompt_length=35, max_tokens=1)
    while not outputs(driver, 10):
        assert len(driver.outstanding("target")) <= 2
        driver.answer("target")
    rows = [[row.sequence_id for row in step.rows] for step in of_type(driver.log, SendStep)]
    assert [10, 0] not in rows
    assert [one for one in rows if 10 in one][2:] == [[0, 10]] * 2


def test_chunks_behind_one_that_failed_are_sent_again() -> None:
    driver = busy()
    driver.submit(10, prompt_length=35, max_tokens=3)

    def lost(row: Row) -> RowResult | None:
        if row.sequence_id != 10:
            return None
        driver.workers["target"].forget(10)
        return RowResult(10, RowStatus.UNKNOWN_SEQUENCE, 0, 0)

    while not all(any(row.sequence_id == 10 for row in step.rows) for step in driver.outstanding("target")):
        driver.answer("target")
    driver.answer("target", instead=lost)
    driver.settle()
    assert outputs(driver, 10) == expected(driver, 10)


def test_a_sequence_cancelled_with_two_chunks_in_flight_leaves_nothing() -> None:
    driver = busy()
    driver.submit(10, prompt_length=35, max_tokens=3)
    while not all(any(row.sequence_id == 10 for row in step.rows) for step in driver.outstanding("target")):
        driver.answer("target")
    driver.cancel(10)
    driver.settle()
    assert not driver.workers["target"].held
    assert not outputs(driver, 10)


def test_an_answer_that_overtakes_the_one_before_it_does_no_harm() -> None:
    driver = busy()
    driver.submit(10, prompt_length=35, max_tokens=3)
    while not all(any(row.sequence_id == 10 for row in step.rows) for step in driver.outstanding("target")):
        driver.answer("target")
    worker = driver.workers["target"]
    steps = [driver.steps["target"].pop(0) for _ in range(2)]
    answers = [
        StepCompleted("target", step.step_id, tuple(worker.run_row(row) for row in step.rows), 0.05) for step in steps
    ]
    for answer in reversed(answers):
        driver.handle(answer)
    driver.settle()
    assert outputs(driver, 10) == expected(driver, 10)
