"""The KV ledger: how much of a worker's KV is valid after a round, and how many pages are spoken for."""

import pytest

from scheduler.key_class import NOBODY
from scheduler.messages import FinishReason, Role, SequenceRequest, WorkerSpec
from scheduler.state.key_accounts import KeyAccount
from scheduler.state.kv_ledger import KvEntry, PageLedger
from scheduler.state.workers import Sequence, TargetWorker


@pytest.mark.parametrize(
    ("proposed", "accepted", "valid"),
    [
        (4, 0, 10),
        (4, 2, 12),
        (4, 3, 13),
        (4, 4, 13),  # the last proposed token was never fed to the draft
        (1, 0, 10),
        (1, 1, 10),
    ],
)
def test_what_a_draft_keeps_of_its_proposal(proposed: int, accepted: int, valid: int) -> None:
    entry = KvEntry(valid=10, ahead=proposed - 1)
    entry.settle_proposal(accepted)
    assert (entry.valid, entry.ahead) == (valid, 0)


def test_a_proposal_is_credited_once() -> None:
    entry = KvEntry(valid=10, ahead=3)
    entry.settle_proposal(0)
    entry.settle_proposal(2)
    assert entry.valid == 10


def test_pages_grow_with_positions_and_come_back_at_once() -> None:
    worker = PageLedger(total_pages=10, page_size=4)
    assert worker.reserve(1, 4)
    assert worker.free_pages == 9
    assert worker.reserve(1, 5)
    assert worker.free_pages == 8
    assert worker.reserve(1, 3)  # never shrinks while the sequence is there
    assert worker.free_pages == 8
    worker.release(1)
    worker.release(1)
    assert worker.free_pages == 10
    worker.check_integrity()


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    worker = PageLedger(total_pages=3, page_size=4)
    assert worker.reserve(1, 8)
    assert not worker.reserve(2, 5)
    assert (worker.free_pages, worker.reserved(2)) == (1, 0)
    assert not worker.reserve(2, 4, spare=1)
    assert worker.reserve(2, 4)


def test_a_newcomer_leaves_pages_for_the_others_to_grow_into() -> None:
    worker = TargetWorker(WorkerSpec("w", Role.TARGET, 4, 10, 1000, 64), 8, 2, batch_size=4)
    assert worker.has_room(40)
    assert not worker.has_room(41)
    for sequence_id in range(5):
        worker.place(waiting(sequence_id, sequence_id), positions=4)
    assert worker.pages.free_pages == 5
    assert worker.has_room(12)
    assert not worker.has_room(13)


@pytest.mark.parametrize(
    ("tokens", "stop", "kept", "reason"),
    [
        ((5, 6), (), 2, None),
        ((5, 6, 7), (), 3, FinishReason.LENGTH),
        ((5, 6, 7, 8, 9), (), 3, FinishReason.LENGTH),
        ((5, 6, 7, 8, 9), (6, 7), 2, FinishReason.STOP),
        ((5, 6, 7, 8, 9), (7,), 3, FinishReason.STOP),
        ((5, 6, 7, 8, 9), (8,), 3, FinishReason.LENGTH),
        ((5,), (5,), 1, FinishReason.STOP),
    ],
)
def test_what_is_committed_of_a_run(
    tokens: tuple[int, ...], stop: tuple[int, ...], kept: int, reason: FinishReason | None
) -> None:
    sequence = Sequence(SequenceRequest(1, (1, 2), 3, frozenset(stop)), 0, KeyAccount(NOBODY))
    assert sequence.commit(tokens) == (tokens[:kept], reason)
    assert sequence.tokens.tokens == [1, 2, *tokens[:kept]]


EVERYBODY = KeyAccount(NOBODY)


def waiting(sequence_id: int, order: int, length: int = 1) -> Sequence:
    return Sequence(SequenceRequest(sequence_id, (1,) * length, 5), order, EVERYBODY)
