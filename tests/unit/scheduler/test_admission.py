"""Who comes into the pool, who waits, who is refused."""

from __future__ import annotations

import pytest

from spool.scheduler.messages import (
    FailSequence,
    FinishReason,
    FinishSequence,
    RefusalCause,
    RefuseSequence,
    SequenceRequest,
    SequenceSubmitted,
)
from tests.unit.scheduler.driver import Driver, expected, of_type, outputs, pair, plain_decoding, prompt_of


def refusal(commands: list[object]) -> RefuseSequence:
    (command,) = commands
    assert isinstance(command, RefuseSequence)
    return command


def test_faulty_requests_are_refused() -> None:
    driver = pair()
    for faulty in ({"prompt_length": 0}, {"max_tokens": 0}, {"draft_length": -1}, {"proposer": "head"}):
        assert refusal(driver.submit(1, **faulty)).cause is RefusalCause.INVALID
    driver.submit(1)
    twice = refusal(driver.submit(1))
    assert (twice.cause, twice.sequence_id) == (RefusalCause.INVALID, 1)
    driver.settle()
    assert outputs(driver, 1) == expected(driver, 1)


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    driver = Driver()
    driver.join("small", pages=5, page_size=4, max_length=1000)
    refused = refusal(driver.submit(1, prompt_length=12, max_tokens=10))
    assert refused.cause is RefusalCause.TOO_LONG
    assert "21 positions" in refused.message
    assert "limit is 20" in refused.message
    # No KV is computed of the last token.
    driver.submit(2, prompt_length=11, max_tokens=10)
    driver.submit(3, prompt_length=20, max_tokens=1)
    driver.settle()
    assert [len(outputs(driver, sequence_id)) for sequence_id in (2, 3)] == [10, 1]
    driver.join("short", pages=1000, max_length=30)
    assert refusal(driver.submit(4, prompt_length=22, max_tokens=10)).cause is RefusalCause.TOO_LONG
    assert not of_type(driver.submit(5, prompt_length=21, max_tokens=10), RefuseSequence)


def test_without_targets_sequences_queue_and_are_checked_whenever_targets_change() -> None:
    driver = Driver()
    assert driver.submit(1, prompt_length=100) == []
    assert driver.submit(2, prompt_length=3) == []
    commands = driver.join("small", max_length=50)
    (failed,) = of_type(commands, FailSequence)
    assert failed.sequence_id == 1
    assert "119 positions" in failed.error
    assert [row.sequence_id for row in driver.steps["small"][0].rows] == [2]
    driver.join("large", max_length=500)
    driver.submit(3, prompt_length=100)
    lost = driver.lose("large")
    assert [failed.sequence_id for failed in of_type(lost, FailSequence)] == [3]


def test_the_queue_is_bounded_in_sequences() -> None:
    driver = Driver(max_running=2, max_queued_sequences=3)
    driver.join("target")
    # Those who come before the next plan need not queue where there is room.
    for sequence_id in range(5):
        assert driver.core.apply(SequenceSubmitted(SequenceRequest(sequence_id, (1, 2), 5)), 0.0) == []
    (refused,) = of_type(driver.submit(5), RefuseSequence)
    assert refused.cause is RefusalCause.QUEUE_FULL
    assert "3 sequences wait, the limit is 3" in refused.message
    driver.cancel(4)
    assert driver.submit(6) == []


def test_the_queue_is_bounded_in_tokens() -> None:
    driver = Driver(max_running=1, max_queued_tokens=50)
    driver.join("target")
    driver.submit(0)
    assert driver.submit(1, prompt_length=60) == []  # nothing else waits: it could never wait otherwise
    assert refusal(driver.submit(2, prompt_length=1)).cause is RefusalCause.QUEUE_FULL
    driver.cancel(1)
    assert driver.submit(3, prompt_length=30) == []
    assert driver.submit(4, prompt_length=20) == []
    assert "limit of 50" in refusal(driver.submit(5, prompt_length=1)).message


def test_a_resubmitted_sequence_goes_on_where_its_output_stopped() -> None:
    driver = pair(max_running=1, max_queued_sequences=1)
    driver.submit(0)
    driver.submit(1)
    assert refusal(driver.submit(2)).cause is RefusalCause.QUEUE_FULL
    whole = plain_decoding(SequenceRequest(7, prompt_of(7, 3), 12))[0]
    assert driver.submit(7, max_tokens=12, committed_output=tuple(whole[:5])) == []  # was admitted once: let in again
    assert driver.submit(8, admitted_before=True) == []
    assert refusal(driver.submit(9)).cause is RefusalCause.QUEUE_FULL
    driver.settle()
    assert outputs(driver, 7) == whole[5:]
    assert FinishSequence(7, FinishReason.LENGTH) in driver.log


@pytest.mark.parametrize(
    ("committed", "stop", "reason"),
    [((4, 5, 6), frozenset(), FinishReason.LENGTH), ((4, 5), frozenset({5}), FinishReason.STOP)],
)
def test_a_resubmitted_sequence_that_was_complete_ends_at_once(
    committed: tuple[int, ...], stop: frozenset[int], reason: FinishReason
) -> None:
    driver = pair()
    commands = driver.submit(1, max_tokens=3, committed_output=committed, stop_token_ids=stop)
    assert commands == [FinishSequence(1, reason)]
    assert driver.core.snapshot().live == 0
