"""A sequence whose KV comes from another worker: what is set aside for it, taken in, and given back."""

from __future__ import annotations

import pytest

from protos import worker_pb2
from scheduler.messages import Role, RowStatus
from scheduler.state.digests import DigestedTokens
from services.worker.sequences import RowRejectedError, WorkerSequence, WorkerSequences, open_sequence
from tests.support.stand_in_worker import MAX_LENGTH, VOCABULARY, StandInEngine

PAGES = 1000


@pytest.fixture
def engine() -> StandInEngine:
    return StandInEngine(pages=PAGES)


@pytest.fixture
def sequences(engine: StandInEngine) -> WorkerSequences:
    return WorkerSequences(engine.pool, Role.TARGET, engine.description, prefix_cache=False)


def coming(tokens: list[int], sequence_id: int = 1) -> WorkerSequence:
    sequence = open_sequence(sequence_id, worker_pb2.SequenceParameters(prompt_length=1))
    sequence.tokens.extend(tokens)
    return sequence


def refusal(sequences: WorkerSequences, sequence: WorkerSequence) -> RowRejectedError:
    with pytest.raises(RowRejectedError) as refused:
        sequences.expect(sequence)
    sequences.check_integrity()
    return refused.value


def test_pages_are_set_aside_for_what_comes_and_come_back(engine: StandInEngine, sequences: WorkerSequences) -> None:
    longest, lost = coming([VOCABULARY - 1] * MAX_LENGTH), coming([0], 2)
    sequences.expect(longest)
    sequences.expect(lost)
    assert engine.pool.free_pages == PAGES - -(-MAX_LENGTH // engine.pool.page_size) - 1
    assert 1 not in sequences
    assert sequences.expects(longest)
    assert not sequences.expects(coming([0]))
    sequences.adopt(longest)
    assert 1 in sequences
    assert not sequences.expects(longest)
    sequences.give_up(lost)
    # No row has come for it yet: it goes too.
    sequences.give_up(longest)
    assert engine.pool.free_pages == PAGES
    assert len(sequences) == 0


def test_a_sequence_for_which_a_row_has_come_stays(sequences: WorkerSequences) -> None:
    sequence = coming([5, 6, 7])
    sequences.expect(sequence)
    sequences.adopt(sequence)
    digest = DigestedTokens([5, 6, 7]).digest(3)
    sequences.prepare(worker_pb2.Row(sequence_id=1, kv_len=3, prefix_digest=digest, tokens=[8]))
    sequences.give_up(sequence)
    assert 1 in sequences


def test_what_cannot_come_is_refused(sequences: WorkerSequences) -> None:
    for tokens in ([], [0] * (MAX_LENGTH + 1)):
        refused = refusal(sequences, coming(tokens))
        assert (refused.status, f"tokens holds {len(tokens)}, " in refused.error) == (RowStatus.INVALID, True)
    refused = refusal(sequences, coming([0, VOCABULARY]))
    assert (refused.status, f"tokens holds {VOCABULARY}, " in refused.error) == (RowStatus.INVALID, True)
    first = coming([1])
    sequences.expect(first)
    assert refusal(sequences, coming([1])).status is RowStatus.INVALID
    sequences.adopt(first)
    assert refusal(sequences, coming([1])).status is RowStatus.INVALID
    with pytest.raises(RowRejectedError, match="not expected any more"):
        sequences.adopt(first)


def test_without_pages_for_all_tokens_nothing_is_set_aside() -> None:
    engine = StandInEngine(pages=2)
    sequences = WorkerSequences(engine.pool, Role.TARGET, engine.description, prefix_cache=False)
    refused = refusal(sequences, coming([1] * (2 * engine.pool.page_size + 1)))
    assert refused.status is RowStatus.OUT_OF_PAGES
    assert engine.pool.free_pages == 2
    sequences.expect(coming([1] * (2 * engine.pool.page_size)))
    assert engine.pool.free_pages == 0


def test_only_exactly_what_is_here_is_held(sequences: WorkerSequences) -> None:
    sequence = coming([5, 6, 7])
    sequences.expect(sequence)
    sequences.adopt(sequence)
    tokens = DigestedTokens([5, 6, 7])
    assert sequences.held(1, 3, tokens.digest(3)) is sequence
    for length, digest in ((2, tokens.digest(2)), (3, tokens.digest(2)), (4, tokens.digest(3))):
        with pytest.raises(RowRejectedError) as refused:
            sequences.held(1, length, digest)
        assert (refused.value.status, refused.value.kv_len) == (RowStatus.KV_MISMATCH, 3)
        assert refused.value.digest == tokens.digest(3)
    with pytest.raises(RowRejectedError) as refused:
        sequences.held(2, 3, tokens.digest(3))
    assert (refused.value.status, refused.value.kv_len) == (RowStatus.UNKNOWN_SEQUENCE, 0)
