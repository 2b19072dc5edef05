"""What every reply of a worker says of the worker: its epoch, the step, and its free pages."""

from __future__ import annotations

import pytest

from protos import worker_pb2
from scheduler.messages import Role
from scheduler.state.digests import EMPTY_DIGEST
from services.rpc.worker_codec import ROLES
from services.worker.executor import StepExecutor, TargetStepExecutor
from services.worker.kv_pages import WrongEpochError
from tests.support.stand_in_worker import MAX_LENGTH, VOCABULARY, StandInEngine

EPOCH = 77
OK, FENCED = worker_pb2.STEP_STATUS_OK, worker_pb2.STEP_STATUS_FENCED
WRONG_EPOCH, INVALID = worker_pb2.STEP_STATUS_WRONG_EPOCH, worker_pb2.STEP_STATUS_INVALID


@pytest.fixture
def executor() -> StepExecutor:
    return TargetStepExecutor(StandInEngine(pages=50), EPOCH)


def opening(sequence_id: int) -> worker_pb2.Row:
    parameters = worker_pb2.SequenceParameters(prompt_length=5)
    prompt = [5, 6, 7, 8, 9]
    return worker_pb2.Row(
        sequence_id=sequence_id, prefix_digest=EMPTY_DIGEST, parameters=parameters, tokens=prompt, sample=True
    )


def step(executor: StepExecutor, step_id: int, *rows: worker_pb2.Row, **fields: int) -> worker_pb2.StepReply:
    given = {"worker_epoch": EPOCH, "scheduler_epoch": 3} | fields
    return executor.execute(worker_pb2.StepRequest(**given, step_id=step_id, rows=rows), executor.clock())


def test_every_reply_names_worker_step_and_free_pages(executor: StepExecutor) -> None:
    replies = [
        (step(executor, 4, opening(1)), OK, 4),
        (step(executor, 0), OK, 0),
        (step(executor, 5, opening(2), worker_epoch=EPOCH - 1), WRONG_EPOCH, 5),
        (step(executor, 5, opening(2), scheduler_epoch=2), FENCED, 5),
        (step(executor, 3, opening(2)), INVALID, 3),
    ]
    free = executor.free_pages
    assert 0 < free < 50
    for reply, status, step_id in replies:
        assert (reply.status, reply.worker_epoch, reply.step_id) == (status, EPOCH, step_id)
        assert reply.free_pages == free
        assert bool(reply.error) == (status != OK)
    assert executor.scheduler_epoch == 3


def test_a_repeated_step_gets_its_reply_again(executor: StepExecutor) -> None:
    first = step(executor, 4, opening(1))
    assert step(executor, 4, opening(1)) == first
    assert executor.free_pages == first.free_pages


def test_a_new_scheduler_begins_with_nothing_here(executor: StepExecutor) -> None:
    step(executor, 4, opening(1))
    assert step(executor, 1, scheduler_epoch=9).status == OK
    assert executor.free_pages == 50
    assert executor.scheduler_epoch == 9


def test_epochs_are_compared_exactly(executor: StepExecutor) -> None:
    step(executor, 4)
    executor.check_epochs(EPOCH, 3)
    for worker_epoch, scheduler_epoch in ((EPOCH + 1, 3), (EPOCH - 1, 3), (EPOCH, 2), (EPOCH, 4)):
        with pytest.raises(WrongEpochError):
            executor.check_epochs(worker_epoch, scheduler_epoch)


def test_describes_all_of_the_engine(executor: StepExecutor) -> None:
    engine = executor._engine.description
    found = executor.describe()
    assert (found.role, found.worker_epoch, found.free_pages) == (ROLES.to_wire(Role.TARGET), EPOCH, 50)
    assert (found.total_pages, found.max_sequence_length, found.vocabulary_size) == (50, MAX_LENGTH, VOCABULARY)
    for name in ("model_id", "tokenizer_digest", "dtype", "device", "page_size", "max_num_batched_tokens"):
        assert getattr(found, name) == getattr(engine, name), name
    for name in ("threads", "kv_bytes_per_token"):
        assert getattr(found, name) == getattr(engine, name), name
    assert list(found.exact_row_counts) == list(engine.exact_row_counts)
    assert found.process_id > 0
