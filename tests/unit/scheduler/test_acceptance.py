"""What is learnt of a draft's tokens, and which of them are verified where not all can be."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.batching.trimming import most_promising
from scheduler.config import Policy, SchedulerConfig
from scheduler.key_class import NOBODY
from scheduler.messages import EmitTokens, Role, Row, RowResult, SendStep, SequenceRequest, WorkerSpec
from scheduler.speculation.acceptance import MAX_CONFIDENCE, ModelAcceptance, OwnAcceptance
from scheduler.speculation.controller import Controller
from scheduler.state.fleet import Fleet
from scheduler.state.key_accounts import KeyAccount
from scheduler.state.workers import Sequence
from scheduler.statistics import Counters
from tests.unit.scheduler.driver import Driver, expected, of_type, outputs

falling = st.lists(st.floats(0, 1), max_size=4).map(lambda chances: sorted(chances, reverse=True))


@given(st.lists(falling, max_size=4), st.integers(0, 9))
def test_no_other_choice_promises_more(chances: list[list[float]], room: int) -> None:
    lengths = most_promising(chances, room)

    def promise(chosen: tuple[int, ...] | list[int]) -> float:
        return sum(sum(found[:length]) for found, length in zip(chances, chosen, strict=True))

    every = product(*(range(len(found) + 1) for found in chances))
    assert sum(lengths) <= room
    assert promise(lengths) == pytest.approx(max(promise(other) for other in every if sum(other) <= room))


@given(st.binary(max_size=8))
def test_chances_are_chances_and_fall(confidences: bytes) -> None:
    chances = ModelAcceptance(4).survival(confidences, len(confidences))
    assert len(chances) == len(confidences)
    assert all(0 < chance < 1 for chance in chances)
    assert all(one >= other for one, other in pairwise(chances))


def test_what_a_confidence_is_worth_is_learned() -> None:
    model = ModelAcceptance(4)
    before = model.chance(200)
    for turn in range(2000):
        # A modest draft and a boaster: three of four, and one of four.
        model.observe(0, 0, bytes([10]), int(turn % 4 != 0), 1)
        model.observe(0, 0, bytes([MAX_CONFIDENCE, MAX_CONFIDENCE]), 0 if turn % 4 else 2, 1)
    assert model.chance(10) == pytest.approx(0.75, abs=0.05)
    assert model.chance(MAX_CONFIDENCE) == pytest.approx(0.4, abs=0.05)
    assert model.survival(bytes([10, 10]), 2)[1] == pytest.approx(0.75**2, abs=0.08)
    assert model.chance(200) == before


def test_chances_are_learnt_for_each_place() -> None:
    """Two of three first tokens are accepted, every second one after them, and no third."""
    model = ModelAcceptance(3)
    for turn in range(6_000):
        first, second = turn % 3 != 0, turn % 2 == 0
        taken = 0 if not first else 1 if not second else 2
        model.observe(taken, min(taken + 1, 3), b"", taken, 50)
    assert model.chances == pytest.approx([2 / 3, 1 / 2, 0.0], abs=0.04)


def test_a_place_that_was_never_reached_is_taken_for_like_the_one_before() -> None:
    model = ModelAcceptance(3)
    for _ in range(2_000):
        model.observe(0, 1, b"", 0, 50)
    assert model.chances[0] < 0.02
    assert model.chances[2] < 0.5


def test_a_sequence_is_taken_for_like_the_others_until_it_shows_otherwise() -> None:
    own, chances = OwnAcceptance(), [0.8, 0.8]
    assert own.survival(chances, 0.0) == pytest.approx([0.8, 0.64])
    for tokens, most in ((4, 0.45), (30, 0.2)):
        for _ in range(tokens):
            own.observe(0, 1)
        assert own.survival(chances, 0.0)[0] < most


PROMPT_LENGTH = 3
CONFIDENCES = {1: bytes([250, 10, 10]), 2: bytes([250, 250, 250]), 3: bytes([10, 10, 10]), 4: b""}


def proposing(packed: int) -> Driver:
    """Four sequences, of which a draft has proposed three tokens each, as sure of them as CONFIDENCES."""
    driver = Driver(policy=Policy.EQSPEC, batch_size=4, draft_length=3, wait_bound_steps=100.0)
    driver.join("target", packed=packed)
    driver.join("draft", Role.DRAFT)
    for sequence_id in CONFIDENCES:
        driver.submit(sequence_id, max_tokens=30)

    def propose(row: Row) -> RowResult:
        result = driver.workers["draft"].run_row(row)
        return replace(result, confidences=CONFIDENCES[row.sequence_id] if result.tokens else b"")

    while not any(row.draft_tokens for step in driver.steps["target"] for row in step.rows):
        if driver.steps["target"]:
            driver.answer("target")
        else:
            driver.answer("draft", instead=propose)
    return driver


def test_where_room_is_short_the_least_promising_tokens_are_left_out_and_no_row() -> None:
    driver = proposing(packed=10)
    (step,) = (step for step in driver.steps["target"] if step.group is not None)
    assert {row.sequence_id: len(row.draft_tokens) for row in step.rows} == {1: 1, 2: 3, 3: 0, 4: 2}
    assert step.group is not None
    assert not step.group.equal_length
    driver.settle()
    for sequence_id in CONFIDENCES:
        assert outputs(driver, sequence_id) == expected(driver, sequence_id)
    steps = of_type(driver.log, SendStep)
    assert max(sum(len(row.tokens) + len(row.draft_tokens) for row in step.rows) for step in steps) == 10


def test_with_room_all_are_verified() -> None:
    driver = proposing(packed=100)
    (step,) = (step for step in driver.steps["target"] if step.group is not None)
    assert [len(row.draft_tokens) for row in step.rows] == [3] * 4


def test_by_cost_what_is_not_worth_its_row_is_left_out_but_looked_at_now_and_then() -> None:
    driver = Driver(policy=Policy.AUTO, batch_size=4, draft_length=4, wait_bound_steps=4.0)
    driver.join("target")
    driver.join("draft", Role.DRAFT, guess=0.5)
    driver.submit(1, prompt_length=PROMPT_LENGTH, max_tokens=1500)
    worker = driver.workers["draft"]

    def propose(row: Row) -> RowResult:
        result = worker.run_row(row)
        wrong = [place for place, token in enumerate(result.tokens) if token != upcoming(row, place)]
        right = wrong[0] if wrong else len(result.tokens)
        return replace(result, confidences=bytes([230] * right + [5] * (len(result.tokens) - right)))

    def upcoming(row: Row, place: int) -> int:
        return oracle[row.kv_len + len(row.tokens) + place - PROMPT_LENGTH]

    oracle = expected(driver, 1)
    for _ in range(20000):
        if driver.steps["draft"]:
            step = driver.steps["draft"][0]
            passes = max((row.draft_length for row in step.rows), default=0)
            driver.answer("draft", propose, seconds=0.0001 * passes)
        elif driver.steps["target"]:
            step = driver.steps["target"][0]
            # A row costs a quarter of what a step does.
            rows = sum(len(row.tokens) + len(row.draft_tokens) for row in step.rows)
            driver.answer("target", seconds=0.02 + 0.005 * rows)
        else:
            break
    assert outputs(driver, 1) == oracle
    late = of_type(driver.log, EmitTokens)[100:]
    drafted, accepted = sum(emitted.drafted for emitted in late), sum(emitted.accepted for emitted in late)
    assert accepted > 0
    # Half of the tokens are right, so that of proposals verified whole less than a third would be.
    assert accepted / drafted > 0.7
    assert any(emitted.drafted > emitted.accepted for emitted in late)


def test_tokens_that_were_not_verified_count_as_what_they_promised() -> None:
    """Else drafts that are often cut short would seem to be bad ones, and be cut the more."""
    config = SchedulerConfig(policy=Policy.AUTO)
    fleet = Fleet(config)
    controller = Controller(config, fleet, Counters())
    for name, role in (("target", Role.TARGET), ("draft", Role.DRAFT)):
        fleet.add(WorkerSpec(name, role, 16, 1000, 1000, 4096))
    sequence = Sequence(SequenceRequest(1, (1, 2), 100), 0, KeyAccount(NOBODY))
    sequence.target, sequence.draft = fleet.targets["target"], fleet.drafts["draft"]
    sequence.requested_draft_length = 4
    for turn in range(3000):
        # Cut after the first of four, which is taken; every tenth is verified whole, and two more are.
        sequence.confidences = bytes([250, 200, 200, 200])
        whole = turn % 10 == 0
        controller.observe(sequence, verified=4 if whole else 1, accepted=3 if whole else 1)
    # Of three tries after the first one two hold.
    chances = controller.draft(sequence.draft).acceptance.chances
    assert chances[0] > 0.9
    assert chances[1] == pytest.approx(2 / 3, abs=0.15)
