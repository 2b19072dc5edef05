"""Which worker takes a sequence in, and what the core does when workers and sequences come close together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import FailSequence, RefuseSequence, Role, SequenceRequest, SequenceSubmitted, WorkerSpec
from scheduler.state.fleet import Fleet
from tests.sim.driver import Driver, of_type


def fleet(*workers: tuple[str, Role], shares_cores: bool = True, policy: Policy = Policy.AUTO) -> Fleet:
    found = Fleet(SchedulerConfig(policy=policy))
    for name, role in workers:
        found.add(WorkerSpec(name, role, 4, 10, 100, 64, shares_cores))
    return found


TARGET, DRAFT = Role.TARGET, Role.DRAFT


def test_a_worker_is_the_only_one_of_its_role_or_is_not() -> None:
    assert (fleet().sole_target, fleet().sole_draft) == (None, None)
    one = fleet(("t", TARGET), ("d", DRAFT))
    assert (one.sole_target, one.sole_draft) == (one.targets["t"], one.drafts["d"])
    two = fleet(("t", TARGET), ("u", TARGET), ("d", DRAFT), ("e", DRAFT))
    assert (two.sole_target, two.sole_draft) == (None, None)
    assert two.remove("u") is not None
    assert two.sole_target is two.targets["t"]
    assert two.remove("u") is None


@pytest.mark.parametrize(
    ("workers", "sharing"),
    [
        ((("t", TARGET),), True),
        ((("t", TARGET), ("d", DRAFT)), True),
        ((("t", TARGET), ("u", TARGET)), False),
        ((("t", TARGET), ("d", DRAFT), ("e", DRAFT)), False),
        ((("d", DRAFT),), False),
    ],
)
def test_only_one_target_and_one_draft_take_turns(workers: tuple[tuple[str, Role], ...], sharing: bool) -> None:
    assert fleet(*workers).time_sliced is sharing
    assert not fleet(*workers, shares_cores=False).time_sliced
    assert not fleet(*workers, policy=Policy.RAGGED).time_sliced


def test_the_target_with_the_fewest_sequences_that_has_room() -> None:
    found = fleet(("t", TARGET), ("u", TARGET))
    first, second = found.targets.values()
    assert found.largest_capacity() == first.capacity > 0
    assert fleet().largest_capacity() == 0
    assert found.pick_target(40, None) is first
    assert found.pick_target(41, None) is None
    first.sequences[1] = first.sequences[2] = second.sequences[3] = None  # type: ignore[assignment]
    # Each now keeps a page back, for its own sequences to grow into.
    assert found.pick_target(37, None) is None
    assert found.pick_target(36, None) is second
    assert found.pick_target(36, 2) is second
    assert found.pick_target(36, 1) is None
    second.draining = True
    assert found.pick_target(36, None) is first
    assert found.pick_target(36, 2) is None
    assert found.pick_target(36, 3) is first
    assert first.pages.reserve(1, 1)
    assert found.pick_target(36, None) is None
    assert found.pick_target(32, None) is first


def test_the_draft_with_the_fewest_sequences_that_has_room() -> None:
    found = fleet(("d", DRAFT), ("e", DRAFT))
    first, second = found.drafts.values()
    assert found.pick_draft(1) is first
    first.sequences[1] = None  # type: ignore[assignment]
    assert found.pick_draft(1) is second
    assert second.pages.reserve(9, 40)
    assert found.pick_draft(1) is first


def test_who_waits_for_a_first_target_that_is_too_small_is_told() -> None:
    driver = Driver(draft_length=0)
    driver.submit(1, prompt_length=60)
    driver.submit(2, prompt_length=3)
    assert [end.sequence_id for end in of_type(driver.join("small", max_length=50), FailSequence)] == [1]


def test_those_who_come_before_the_next_plan_need_not_queue() -> None:
    driver = Driver(max_running=2, max_queued_sequences=1, draft_length=0)
    driver.join("target")
    request = SequenceRequest(1, (1, 2, 3), 5)
    refused = [
        command.sequence_id
        for sequence_id in (1, 2, 3, 4, 5)
        for command in driver.core.apply(SequenceSubmitted(replace(request, sequence_id=sequence_id)), 0.0)
        if isinstance(command, RefuseSequence)
    ]
    assert refused == [4, 5]
