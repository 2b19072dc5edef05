"""Targets that drain: who leaves when, with KV or without, and what becomes of moves that go wrong."""

from __future__ import annotations

from spool.scheduler.config import KvMovement
from spool.scheduler.messages import MoveKv, WorkerDrained
from tests.unit.scheduler.driver import Driver, check_to_the_end, of_type


def cell(movement: KvMovement, sequences: int, **config: object) -> Driver:
    """A target `old` with sequences in the middle of decoding, and one, `new`, that has just joined."""
    driver = Driver(kv_movement=movement, steps_in_flight=1, draft_length=0, **config)
    driver.join("old")
    for sequence_id in range(1, sequences + 1):
        driver.submit(sequence_id)
    for _ in range(3):
        driver.answer("old")
    driver.join("new")
    return driver


def test_target_without_sequences_is_drained_at_once() -> None:
    driver = Driver()
    driver.join("old")
    assert of_type(driver.drain("old"), WorkerDrained) == [WorkerDrained("old")]
    assert of_type(driver.drain("nobody"), WorkerDrained) == [WorkerDrained("nobody")]
    assert not of_type(driver.plan(), WorkerDrained)


def test_moves_are_few_at_a_time_and_the_others_decode_on() -> None:
    driver = cell(KvMovement.ALWAYS, sequences=7, batch_size=7)
    driver.drain("old")
    moves = of_type(driver.answer("old"), MoveKv)
    assert len(moves) == 4
    assert len(driver.only_step("old").rows) == 3
    driver.moved(moves[0])
    assert len(of_type(driver.answer("old"), MoveKv)) == 1
    for move in of_type(driver.log, MoveKv)[1:]:
        driver.moved(move)
    while not of_type(driver.log, WorkerDrained):
        for move in of_type(driver.answer("old"), MoveKv):
            driver.moved(move)
    check_to_the_end(driver, *range(1, 8))


def test_the_measured_times_decide() -> None:
    driver = cell(KvMovement.AUTO, sequences=2)
    driver.drain("old")
    first, second = of_type(driver.answer("old"), MoveKv)  # nothing is known of moving: it is tried
    driver.moved(first, seconds=30.0)
    driver.moved(second, seconds=30.0)
    driver.lose("old")
    driver.join("old")
    driver.drain("new")
    driver.answer("new")
    driver.answer("new")
    assert len(of_type(driver.log, MoveKv)) == 2
    assert driver.core.snapshot().moves.rehomed == 2
    check_to_the_end(driver, 1, 2)
