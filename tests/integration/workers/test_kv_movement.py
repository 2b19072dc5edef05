"""KV that moves from a worker that leaves: outputs stay the oracle's, and whatever goes wrong leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from spool.engine.models.loading import load_target_engine
from spool.engine.settings import EngineSettings
from spool.protos import worker_pb2, worker_pb2_grpc
from spool.scheduler.config import KvMovement, Policy, SchedulerConfig
from spool.scheduler.messages import Role
from spool.scheduler.state.digests import EMPTY_DIGEST, DigestedTokens
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler.workers.worker_link import WorkerEndpoint
from spool.services.worker.executor import StepExecutor
from spool.services.worker.server import WorkerServer, step_thread
from tests.integration.workers.test_killed_targets import Output, decode
from tests.support.cells import LINKS, Worker, client, prompt_of, read, read_some, request_of, running_cell
from tests.support.stand_in_worker import StandInEngine, continuation
from tests.support.tiny_models import TORCH_SHAPE, save_tiny_pair
from tests.support.waiting import LONG, until

pytestmark = pytest.mark.slow

MOVING = SchedulerConfig(policy=Policy.RAGGED, max_running=32, kv_movement=KvMovement.ALWAYS)
EPOCH = 7
SCHEDULER_EPOCH = 11


def target_of(workers: Sequence[Worker], worker_id: str) -> Worker:
    return next(worker for worker in workers if worker.worker_id == worker_id)


async def test_target_that_leaves_hands_its_sequences_over_with_their_kv() -> None:
    async with running_cell(targets=2, config=MOVING, step_seconds=0.002) as cell, client(cell.resolve) as backend:
        streams = [await backend.submit(request_of(index, 1000)) for index in range(12)]
        begun = [await read_some(stream, 20) for stream in streams]
        leaving = target_of(cell.workers, "target-0")
        assert leaving.executor.sequences
        assert await leaving.registration.leave(LONG) == 0
        assert not leaving.pages_in_use
        for index, (tokens, stream) in enumerate(zip(begun, streams, strict=True)):
            assert tokens + await read(stream) == continuation(prompt_of(index), 1000)
        moves = cell.service.core.snapshot().moves
        assert moves.moves == 6
        assert (moves.failed, moves.rehomed) == (0, 0)
        page = leaving.executor.kv_transfer.layout.page_bytes
        assert moves.bytes >= moves.positions * 8
        assert moves.bytes % page == 0
        await cell.wait_empty()


@dataclass
class Served:
    """One worker and a stub to speak to it, as a scheduler of SCHEDULER_EPOCH."""

    executor: StepExecutor
    stub: worker_pb2_grpc.WorkerStub
    address: str
    steps: int = 0

    @property
    def pages_in_use(self) -> int:
        description = self.executor.describe()
        return description.total_pages - description.free_pages

    async def step(self, *rows: worker_pb2.Row) -> worker_pb2.StepReply:
        request = worker_pb2.StepRequest(
            worker_epoch=EPOCH, scheduler_epoch=SCHEDULER_EPOCH, step_id=self.steps, rows=rows
        )
        self.steps += 1
        async for reply in self.stub.Steps(iter([request])):
            return reply
        raise AssertionError("no reply")


@asynccontextmanager
async def served(executor: StepExecutor) -> AsyncIterator[Served]:
    server = WorkerServer(executor)
    address = await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            worker = Served(executor, worker_pb2_grpc.WorkerStub(channel), address)
            await worker.step()
            yield worker
    finally:
        await server.stop(1)


TOKENS = [31, 32, 33, 34, 35, 36, 37, 38, 39, 40]
PARAMETERS = worker_pb2.SequenceParameters(prompt_length=len(TOKENS))


def opening() -> worker_pb2.Row:
    return worker_pb2.Row(sequence_id=5, prefix_digest=EMPTY_DIGEST, tokens=TOKENS, sample=True, parameters=PARAMETERS)


def import_from(address: str, **fields: object) -> worker_pb2.ImportKvRequest:
    wanted: dict[str, object] = {
        "worker_epoch": EPOCH,
        "scheduler_epoch": SCHEDULER_EPOCH,
        "sequence_id": 5,
        "tokens": TOKENS,
        "parameters": PARAMETERS,
        "source_address": address,
        "source_worker_epoch": EPOCH,
        "source_scheduler_epoch": SCHEDULER_EPOCH,
    }
    return worker_pb2.ImportKvRequest(**(wanted | fields))  # type: ignore[arg-type]


def stand_in(**settings: object) -> StepExecutor:
    engine = StandInEngine(**settings)  # type: ignore[arg-type]
    return StepExecutor(engine, worker_epoch=EPOCH, kv_store=engine.kv_store)


@asynccontextmanager
async def two(**settings: object) -> AsyncIterator[tuple[Served, Served]]:
    """A worker that holds a sequence of TOKENS, and another one."""
    async with served(stand_in()) as source, served(stand_in(**settings)) as destination:
        assert list((await source.step(opening())).rows.kv_lens) == [len(TOKENS)]
        yield source, destination


async def refusal(worker: Served, request: worker_pb2.ImportKvRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.stub.ImportKv(request, timeout=LONG)
    await until(lambda: not worker.pages_in_use)
    return caught.value.code(), caught.value.details() or ""


async def test_imported_sequence_goes_on_as_if_it_had_always_been_there() -> None:
    async with two() as (source, destination):
        scoped = worker_pb2.SequenceParameters(prompt_length=len(TOKENS), cache_scope=b"s" * 32)
        reply = await destination.stub.ImportKv(import_from(source.address, parameters=scoped), timeout=LONG)
        assert reply.bytes == 3 * 4 * 8
        assert reply.seconds > 0
        bonus = continuation(TOKENS, 2)
        digest = DigestedTokens(TOKENS).digest(len(TOKENS))
        following = worker_pb2.Row(
            sequence_id=5, kv_len=len(TOKENS), prefix_digest=digest, tokens=bonus[:1], sample=True
        )
        assert list((await destination.step(following)).rows.tokens) == bonus[1:]
        # Its pages are for others of its scope.
        for number, (parameters, reused) in enumerate(((PARAMETERS, 0), (scoped, 8)), 6):
            another = opening()
            another.sequence_id = number
            another.parameters.CopyFrom(parameters)
            assert sum((await destination.step(another)).rows.reused) == reused
        destination.executor.check_integrity()
        # The source keeps what it has until it is told to release it.
        assert source.executor.sequences == 1


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"worker_epoch": 6}, grpc.StatusCode.FAILED_PRECONDITION, "worker_epoch is 6"),
        ({"scheduler_epoch": 10}, grpc.StatusCode.FAILED_PRECONDITION, "scheduler_epoch is 10"),
        ({"source_worker_epoch": 6}, grpc.StatusCode.FAILED_PRECONDITION, "worker_epoch is 6"),
        ({"source_scheduler_epoch": 10}, grpc.StatusCode.FAILED_PRECONDITION, "scheduler_epoch is 10"),
        ({"sequence_id": 6}, grpc.StatusCode.NOT_FOUND, "sequence 6 is not known"),
        ({"tokens": TOKENS[:-1]}, grpc.StatusCode.FAILED_PRECONDITION, "kv_len is 9"),
        ({"tokens": [*TOKENS[:-1], 99]}, grpc.StatusCode.FAILED_PRECONDITION, "other tokens"),
        ({"tokens": []}, grpc.StatusCode.INVALID_ARGUMENT, "tokens holds 0"),
        ({"tokens": [1 << 20]}, grpc.StatusCode.INVALID_ARGUMENT, "must be below vocabulary_size"),
        ({"parameters": worker_pb2.SequenceParameters()}, grpc.StatusCode.INVALID_ARGUMENT, "prompt_length is 0"),
        ({"source_address": "127.0.0.1:1"}, grpc.StatusCode.UNAVAILABLE, "127.0.0.1:1 gave no KV"),
    ],
)
async def test_import_that_cannot_be_is_refused(fields: dict[str, object], code: grpc.StatusCode, reason: str) -> None:
    async with two() as (source, destination):
        given = await refusal(destination, import_from(source.address, **fields))
        assert given[0] is code
        assert reason in given[1]


# --- real engines -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_pair("llama", tmp_path_factory.mktemp("tiny"), **TORCH_SHAPE)[0]


Loaded = tuple[StepExecutor, ThreadPoolExecutor]


def load(folder: Path, tells_fingerprint: bool = True, **settings: object) -> Loaded:
    """A worker's executor and the thread that it computes on: numbers of threads, and so bits, belong to a thread."""
    thread = step_thread()
    return thread.submit(_load, folder, tells_fingerprint, settings).result(), thread


def _load(folder: Path, tells_fingerprint: bool, settings: dict[str, object]) -> StepExecutor:
    defaults = {"dtype": "float32", "threads": 1, "page_size": 16, "kv_pages": 200, "max_num_batched_tokens": 64}
    engine = load_target_engine(EngineSettings(str(folder), **(defaults | settings)), lambda *_: None)  # type: ignore[arg-type]
    if not tells_fingerprint:
        engine.description = replace(engine.description, fingerprint={})
    return StepExecutor(engine, worker_epoch=EPOCH, kv_store=engine.kv_store)


async def moved(executors: Sequence[Loaded], leaves: bool) -> tuple[list[Output], SchedulerService]:
    """The outputs of sequences, greedy and sampled, while the first worker leaves in the middle of all."""
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(SchedulerService(MOVING, scheduler_epoch=1, link_options=LINKS))
        for index, (executor, thread) in enumerate(executors):
            server = WorkerServer(executor, thread=thread)
            endpoint = WorkerEndpoint(f"target-{index}", Role.TARGET, await server.start())
            stack.push_async_callback(server.stop, 1)
            await service.workers.add([endpoint])

        async def leave() -> None:
            await service.remove_worker("target-0", LONG)
            assert not executors[0][0].sequences

        outputs, counts = await decode(service, 60, leave if leaves else None)
        assert counts == (0, 0)
        return outputs, service


@pytest.mark.parametrize(
    "settings", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}], ids=str
)
def test_logits_have_the_same_bits_where_real_kv_has_moved(target_folder: Path, settings: dict[str, str]) -> None:
    plain, _ = asyncio.run(moved([load(target_folder, **settings)], leaves=False))
    outputs, service = asyncio.run(moved([load(target_folder, **settings) for _ in range(2)], leaves=True))
    moves = service.core.snapshot().moves
    assert moves.moves > 0
    assert moves.failed == 0
    assert outputs == plain


@pytest.mark.parametrize(("ours", "theirs"), [("auto", "int8"), ("int8", "auto")])
def test_kv_of_another_dtype_is_refused(target_folder: Path, ours: str, theirs: str) -> None:
    executors = [load(target_folder, kv_cache_dtype=dtype)[0] for dtype in (theirs, ours)]

    async def run() -> None:
        async with served(executors[0]) as source, served(executors[1]) as destination:
            assert list((await source.step(opening())).rows.kv_lens) == [len(TOKENS)]
            code, reason = await refusal(destination, import_from(source.address))
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            names = {"auto": "float32", "int8": "int8"}
            assert f"dtype of the KV to come is {names[theirs]}, must be {names[ours]}" in reason

    asyncio.run(run())


@pytest.mark.parametrize("tells", [True, False], ids=["known", "unknown"])
def test_kv_moves_to_no_target_with_another_compute_digest(target_folder: Path, tells: bool) -> None:
    """Where fingerprints tell that targets are not alike, sequences end where they are; else their KV is computed anew,
    as the digest is another."""
    plain, _ = asyncio.run(moved([load(target_folder)], leaves=False))
    executors = [load(target_folder, tells), load(target_folder, tells, numerics="universal")]
    outputs, service = asyncio.run(moved(executors, leaves=True))
    moves = service.core.snapshot().moves
    assert moves.moves == 0
    assert (moves.failed > 0) == (not tells)
    assert [[token for token, _ in output] for output in outputs] == [[token for token, _ in one] for one in plain]
