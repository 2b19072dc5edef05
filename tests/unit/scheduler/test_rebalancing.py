"""Crowded targets: who leaves for a target with fewer sequences, how many, and who stays."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from scheduler.config import KvMovement, Policy
from scheduler.messages import FinishSequence, MoveKv, SequenceRequest
from scheduler.state.digests import DigestedTokens
from tests.sim.driver import Driver, of_type, outputs
from tests.sim.model import plain_decoding

ENDLESS = 3000
BATCH = 32


def crowded(
    sequences: int, *, batch_size: int = BATCH, rounds: int = 12, tokens: int = ENDLESS, **more: object
) -> Driver:
    """A target `old` that has decoded all of these sequences for so many steps. Nothing is drafted."""
    config: dict[str, object] = {"kv_movement": KvMovement.ALWAYS, "max_running": 1000, "draft_length": 0, **more}
    driver = Driver(batch_size=batch_size, prefill_chunk=4096, **config)
    driver.join("old", pages=100_000, packed=8192)
    for sequence_id in range(sequences):
        driver.submit(sequence_id, max_tokens=tokens)
    answer(driver, rounds)
    return driver


def answer(driver: Driver, times: int) -> None:
    """Every worker's oldest step, so many times; KV that moves arrives in between."""
    for _ in range(times):
        for worker_id in list(driver.steps):
            if driver.outstanding(worker_id):
                driver.now += 0.01
                driver.answer(worker_id)
        driver.answer_moves()


def counts(driver: Driver) -> dict[str, int]:
    return {worker.worker_id: worker.sequences for worker in driver.core.snapshot().workers}


def moved(driver: Driver) -> Counter[int]:
    """How often each sequence has moved with its KV."""
    return Counter(move.opening.sequence_id for move in of_type(driver.log, MoveKv))


def test_sequences_move_to_a_target_that_joins_until_both_have_one_batch() -> None:
    driver = crowded(64, tokens=80)
    assert not of_type(driver.join("new", pages=100_000, packed=8192), MoveKv)
    answer(driver, 70)
    assert counts(driver) == {"old": 32, "new": 32}
    assert sorted(moved(driver).values()) == [1] * 32
    assert driver.core.snapshot().moves.moves == 32
    driver.settle()
    for sequence_id in range(64):
        prompt = tuple((sequence_id * 7 + i) % 50 for i in range(3))
        assert outputs(driver, sequence_id) == plain_decoding(SequenceRequest(sequence_id, prompt, 80))[0]
    assert len(of_type(driver.log, FinishSequence)) == 64
    for worker in driver.workers.values():
        assert not worker.held
        worker.pool.check_conservation([])


def test_one_sequence_is_under_way_at_a_time_and_the_others_decode_on() -> None:
    driver = crowded(64)
    driver.join("new", pages=100_000, packed=8192)
    while not driver.moves:
        driver.answer("old")
    ((move, _),) = driver.moves.values()
    before = {sequence_id: len(outputs(driver, sequence_id)) for sequence_id in range(64)}
    for _ in range(20):
        driver.answer("old")
    assert len(driver.moves) == 1
    after = {sequence_id: len(outputs(driver, sequence_id)) for sequence_id in range(64)}
    assert [one for one in before if after[one] == before[one]] == [move.opening.sequence_id]
    driver.moved(move)
    driver.answer("old")
    assert len(driver.moves) == 1


@pytest.mark.parametrize("sequences", [1, 31, 32])
def test_nothing_moves_while_all_fit_in_one_batch(sequences: int) -> None:
    driver = crowded(sequences)
    driver.join("new")
    answer(driver, 50)
    assert counts(driver) == {"old": sequences, "new": 0}


def test_a_batch_and_one_more_lose_the_one() -> None:
    driver = crowded(33)
    driver.join("new")
    answer(driver, 50)
    assert counts(driver) == {"old": 32, "new": 1}


@pytest.mark.parametrize("seed", range(5))
def test_numbers_end_within_a_quarter_of_each_other_and_stay_so(seed: int) -> None:
    """What is asked of the ends follows from the rule; the way there, and how many go, are the core's."""
    rng = random.Random(seed)
    batch_size, sequences, joining = rng.choice((4, 8, 16)), rng.randint(20, 70), rng.randint(1, 3)
    driver = crowded(sequences, batch_size=batch_size, rounds=40)
    for place in range(joining):
        driver.join(f"new{place}", pages=100_000, packed=8192)
        answer(driver, rng.choice((0, 5, 60)))
    answer(driver, 250)
    settled, so_far = counts(driver), len(of_type(driver.log, MoveKv))
    assert sum(settled.values()) == sequences
    for one in settled.values():
        for other in settled.values():
            assert math.ceil(one / batch_size) <= 1.25 * math.ceil((other + 1) / batch_size)
    # A later target may take a sequence that had moved before, but none goes to and fro.
    assert max(moved(driver).values(), default=0) <= joining
    answer(driver, 70)
    assert len(of_type(driver.log, MoveKv)) == so_far
    assert counts(driver) == settled


@pytest.mark.parametrize("kv_movement", [KvMovement.ALWAYS, KvMovement.AUTO])
def test_under_a_steady_load_few_sequences_move(kv_movement: KvMovement) -> None:
    """Another sequence comes for each that ends, of any length; the two targets hardly ever drift apart so far."""
    rng = random.Random(3)
    driver = Driver(batch_size=8, kv_movement=kv_movement, max_running=1000, draft_length=0)
    for name in ("one", "two"):
        driver.join(name, pages=100_000)
    total = 40
    for sequence_id in range(total):
        driver.submit(sequence_id, max_tokens=rng.randint(1, 60))
    seen = 0
    for _ in range(500):
        answer(driver, 1)
        ended = len(of_type(driver.log[seen:], FinishSequence))
        seen = len(driver.log)
        for _ in range(ended):
            driver.submit(total, max_tokens=rng.randint(1, 60))
            total += 1
    assert total > 250
    assert max(moved(driver).values(), default=1) == 1
    assert len(of_type(driver.log, MoveKv)) < total / 20


def test_nothing_moves_to_a_target_that_drains() -> None:
    driver = crowded(64)
    driver.join("new", pages=100_000, packed=8192)
    driver.drain("new")
    answer(driver, 50)
    assert not of_type(driver.log, MoveKv)
    assert counts(driver) == {"old": 64, "new": 0}


def test_nothing_moves_where_there_are_no_pages() -> None:
    driver = crowded(64)
    driver.join("new", pages=40, page_size=4)
    answer(driver, 20)
    taken = counts(driver)["new"]
    assert 0 < taken < 10
    pages = next(worker.free_pages for worker in driver.core.snapshot().workers if worker.worker_id == "new")
    assert pages >= 0
    driver.core.check_integrity()


def test_cohorts_of_one_batch_need_no_relief() -> None:
    driver = crowded(64, policy=Policy.EQSPEC, batch_size=4)
    driver.join("new", pages=100_000)
    answer(driver, 50)
    assert not of_type(driver.log, MoveKv)


def long_prompts(kv_movement: KvMovement, tokens: int, rounds: int) -> Driver:
    """Twelve sequences in batches of eight, of 400 tokens each that take 0.4 s to compute, and of so many to come. Some
    have measured what steps take: 0.02 s, and a millisecond for each token that is fed."""
    driver = Driver(batch_size=8, kv_movement=kv_movement, max_running=1000, draft_length=0, prefill_chunk=100)
    driver.join("old", pages=100_000)
    for sequence_id in range(12):
        driver.submit(sequence_id, prompt_length=400, max_tokens=tokens)
    decode(driver, 60 + rounds)
    driver.join("new", pages=100_000)
    return driver


def decode(driver: Driver, times: int) -> None:
    for _ in range(times):
        for worker_id in list(driver.steps):
            if driver.outstanding(worker_id):
                fed = sum(len(row.tokens) for row in driver.outstanding(worker_id)[0].rows)
                driver.answer(worker_id, seconds=0.02 + 0.001 * fed)
        for move, _ in list(driver.moves.values()):
            driver.moved(move, seconds=0.01)


def test_without_moving_kv_they_are_computed_anew_one_after_the_other_where_that_pays() -> None:
    driver = long_prompts(KvMovement.NEVER, tokens=600, rounds=100)
    for _ in range(100):
        decode(driver, 1)
        assert driver.core._fleet.targets["new"].count(driver.core._live.running[0].state.PREFILLING) <= 1
    assert not of_type(driver.log, MoveKv)
    assert driver.core.snapshot().moves.rehomed == 4
    assert counts(driver) == {"old": 8, "new": 4}


def test_nothing_is_computed_anew_for_less_than_it_takes() -> None:
    """0.4 s of computing for at most 15 rounds that are sooner by one step of less than 0.03 s."""
    driver = long_prompts(KvMovement.NEVER, tokens=30, rounds=0)
    assert all(5 < one.length - 400 < 30 for one in driver.core._live.running.values())
    decode(driver, 200)
    assert driver.core.snapshot().moves.rehomed == 0
    assert len(of_type(driver.log, FinishSequence)) == 12


def test_nothing_moves_that_has_hardly_begun_once_moves_are_known_to_take_time() -> None:
    driver = crowded(12, batch_size=8, kv_movement=KvMovement.AUTO)
    driver.join("new", pages=100_000)
    while not driver.moves:
        driver.answer("old")
    ((move, _),) = driver.moves.values()
    driver.moved(move, seconds=1.0)
    answer(driver, 5)
    assert len(of_type(driver.log, MoveKv)) == 1


def test_destination_that_is_lost_leaves_the_sequence_where_it_was() -> None:
    driver = crowded(40, tokens=100)
    driver.join("new", pages=100_000)
    while not driver.moves:
        driver.answer("old")
    ((move, _),) = driver.moves.values()
    driver.lose("new")
    del driver.workers["new"], driver.steps["new"]
    assert counts(driver) == {"old": 40}
    driver.moved(move)
    driver.settle()
    sequence_id = move.opening.sequence_id
    assert outputs(driver, sequence_id) == plain_decoding(move.opening)[0]
    assert len(of_type(driver.log, FinishSequence)) == 40


def test_source_that_drains_meanwhile_loses_the_others_too() -> None:
    driver = crowded(40, tokens=100)
    driver.join("new", pages=100_000, packed=8192)
    while not driver.moves:
        driver.answer("old")
    driver.drain("old")
    answer(driver, 50)
    assert counts(driver) == {"old": 0, "new": 40}
    driver.settle()
    assert len(of_type(driver.log, FinishSequence)) == 40


def test_kv_that_does_not_get_through_is_computed_anew_at_the_destination() -> None:
    driver = crowded(33, tokens=100)
    driver.join("new", pages=100_000)
    while not driver.moves:
        driver.answer("old")
    ((move, _),) = driver.moves.values()
    held = DigestedTokens(move.tokens)
    assert held.digest(len(move.tokens)) == move.prefix_digest
    driver.moved(move, moved=False)
    assert counts(driver) == {"old": 32, "new": 1}
    driver.settle()
    assert outputs(driver, move.opening.sequence_id) == plain_decoding(move.opening)[0]
