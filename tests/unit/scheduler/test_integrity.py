"""Records of the core that were changed behind its back: each kind is found, and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler.core import SchedulerCore
from scheduler.messages import Role
from scheduler.state.kv_ledger import KvEntry
from scheduler.state.sequence_record import SequenceState
from scheduler.state.workers import DraftWorker, Sequence, TargetWorker
from tests.unit.scheduler.driver import Driver

Damage = Callable[[SchedulerCore, TargetWorker, DraftWorker, Sequence], object]


def prefilling() -> Driver:
    """Sequences 1 and 2 are on their way through the target, 3 waits."""
    driver = Driver(max_running=2, steps_in_flight=1, draft_length=3)
    driver.join("target")
    driver.join("draft", Role.DRAFT)
    for sequence_id in (1, 2, 3):
        driver.submit(sequence_id)
    return driver


def until(state: SequenceState) -> Driver:
    """Until sequence 1 is in this state."""
    driver = prefilling()
    for _ in range(8):
        for worker_id in ("target", "draft"):
            if driver.core._live.sequences[1].state is state:
                return driver
            if driver.steps[worker_id]:
                driver.answer(worker_id)
    raise AssertionError(f"sequence 1 never is {state.value}")


def damaged(driver: Driver, damage: Damage) -> str:
    """What is found."""
    core = driver.core
    core.check_integrity()
    damage(core, core._fleet.targets["target"], core._fleet.drafts["draft"], core._live.sequences[1])
    with pytest.raises(RuntimeError) as found:
        core.check_integrity()
    return str(found.value)


def place_another(core: SchedulerCore, target: TargetWorker, draft: DraftWorker, sequence: Sequence) -> None:
    target.sequences[99] = sequence
    target.kv[99] = KvEntry()


def forget_account(core: SchedulerCore, target: TargetWorker, draft: DraftWorker, sequence: Sequence) -> None:
    sequence.account.running += 1


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda core, target, draft, one: setattr(core._live.waiting, "tokens", 7), "the queue counts 7 tokens"),
        (lambda core, target, draft, one: core._live.running.pop(1), "sequence 1 is not exactly one of waiting and"),
        (lambda core, target, draft, one: core._live.running.update({3: core._live.sequences[3]}), "sequence 3 is not"),
        (lambda core, target, draft, one: core._live.sequences.pop(3), "wait or run that are not in the live set"),
        (forget_account, "counts 3 running sequences, 2 run"),
        (lambda core, target, draft, one: setattr(one, "length", one.length + 1), "sequence 1 has 3 tokens, not 4"),
        (lambda core, target, draft, one: target.sequences.pop(1), "sequence 1 is unknown to its worker target"),
        (lambda core, target, draft, one: core._fleet.targets.clear(), "sequence 1 is unknown to its worker target"),
        (place_another, "worker target has 3 sequences, 2 are placed there"),
        (lambda core, target, draft, one: target.kv.pop(1), "worker target: sequences and KV ledger differ"),
        (lambda core, target, draft, one: target.outstanding.clear(), "rows in flight and outstanding steps differ"),
        (lambda core, target, draft, one: setattr(target.kv[1], "valid", 9999), "sequence 1 holds 9999 positions, too"),
        (lambda core, target, draft, one: setattr(target.kv[1], "ahead", 9999), "sequence 1 holds 9999 positions, too"),
        (lambda core, target, draft, one: setattr(target.pages, "free_pages", 0), "pages reserved and 0 free of 1000"),
        (lambda core, target, draft, one: target.prefilling.remove(one), "sequence 1 is prefilling but not in that"),
        (lambda core, target, draft, one: setattr(target, "verifying", 1), "has 2 sequences and 3 in its indexes"),
        (lambda core, target, draft, one: target.coming.add(3), "has 2 sequences and 3 in its indexes"),
        (lambda core, target, draft, one: target.suspects.update({5: one}), "has 2 sequences and 3 in its indexes"),
        (
            lambda core, target, draft, one: draft.verifying.update({one.sequence_id: one}),
            "draft draft: verifying or ready sequences",
        ),
        (lambda core, target, draft, one: draft.ready.update({9: one}), "worker draft: sequences that left are ready"),
        (lambda core, target, draft, one: setattr(one, "target", None), "sequence 1 runs without a target"),
        (
            lambda core, target, draft, one: setattr(one, "state", SequenceState.WAITING),
            "sequence 1 is waiting but not in that index",
        ),
    ],
)
def test_what_does_not_agree_is_named(damage: Damage, found: str) -> None:
    assert found in damaged(prefilling(), damage)


@pytest.mark.parametrize(("state", "worker"), [(SequenceState.DRAFTING, "draft"), (SequenceState.VERIFYING, "target")])
def test_who_is_drafted_for_or_verified_has_a_row_in_flight(state: SequenceState, worker: str) -> None:
    found = f"sequence 1 is {state.value} but not in that index"

    def flights(target: TargetWorker, draft: DraftWorker) -> dict:
        return (draft if worker == "draft" else target).in_flight

    assert found in damaged(until(state), lambda core, target, draft, one: flights(target, draft).pop(1))
    assert found in damaged(
        until(state), lambda core, target, draft, one: setattr(flights(target, draft)[1], "abandoned", True)
    )
    assert found in damaged(
        until(state),
        lambda core, target, draft, one: setattr(flights(target, draft)[1], "sequence", core._live.sequences[2]),
    )


def test_a_row_in_flight_is_that_of_a_sequence_of_the_worker() -> None:
    def leave(core: SchedulerCore, target: TargetWorker, draft: DraftWorker, sequence: Sequence) -> None:
        flight = draft.in_flight[1]
        sequence.draft = None
        del draft.sequences[1], draft.kv[1]
        draft.pages.release(1)
        sequence.state = SequenceState.PREFILLING
        target.prefilling.add(sequence)
        target.coming.remove(sequence.length)
        assert not flight.abandoned

    assert "a row is in flight for a sequence that left" in damaged(until(SequenceState.DRAFTING), leave)
