"""Worker processes on their own: started by the launcher, spoken to over gRPC as a scheduler would."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from spool.engine.settings import EngineSettings
from spool.protos import worker_pb2, worker_pb2_grpc
from spool.scheduler.config import SchedulerConfig
from spool.scheduler.messages import Role
from spool.scheduler.state.digests import EMPTY_DIGEST
from spool.services.backend.sequence_stream import SequenceFailedError
from spool.services.launch.child_process import ChildProcess, Command
from spool.services.launch.launcher import ProcessStartError, WorkerLaunch, WorkerLauncher
from spool.services.rpc.protocol_version import SPOKEN
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler.workers.worker_link import WorkerEndpoint
from tests.support.cells import LINKS
from tests.support.stand_in_worker import DEVICE_FAILS, continuation
from tests.support.tiny_models import save_tiny_pair
from tests.support.waiting import LONG, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PROCESSORS = os.sched_getaffinity(0)
PROMPT = [5, 6, 7, 8, 9]
DESCRIBE = worker_pb2.DescribeRequest(protocol_version=SPOKEN.newest)


def stand_in(role: Role, name: str = "", **settings: Any) -> WorkerLaunch:
    return WorkerLaunch(
        role,
        settings,
        threads=1,
        name=name,
        module="tests.support.stand_in_worker",
        environment={"PYTHONPATH": str(ROOT)},
    )


@asynccontextmanager
async def stub_of(address: str) -> AsyncIterator[worker_pb2_grpc.WorkerStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield worker_pb2_grpc.WorkerStub(channel)


def opening(sequence_id: int = 1, **fields: Any) -> worker_pb2.Row:
    parameters = worker_pb2.SequenceParameters(prompt_length=len(PROMPT))
    return worker_pb2.Row(
        sequence_id=sequence_id, prefix_digest=EMPTY_DIGEST, tokens=PROMPT, parameters=parameters, **fields
    )


def step(description: worker_pb2.WorkerDescription, step_id: int, *rows: worker_pb2.Row) -> worker_pb2.StepRequest:
    return worker_pb2.StepRequest(worker_epoch=description.worker_epoch, scheduler_epoch=1, step_id=step_id, rows=rows)


async def exchange(
    stub: worker_pb2_grpc.WorkerStub, requests: Iterable[worker_pb2.StepRequest]
) -> list[worker_pb2.StepReply]:
    return [reply async for reply in stub.Steps(iter(requests), timeout=LONG)]


def alive(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_draft_and_target_are_processes_of_their_own() -> None:
    messages: list[tuple[str, str, float | None]] = []
    launches = [stand_in(Role.DRAFT), stand_in(Role.TARGET), replace(stand_in(Role.TARGET), threads=3)]
    async with WorkerLauncher(launches, on_loading=lambda *message: messages.append(message)) as launcher:
        workers = launcher.workers
        assert [worker.worker_id for worker in workers] == ["draft-0", "target-0", "target-1"]
        assert len({os.getpid(), *(worker.process_id for worker in workers)}) == 4
        epochs = set()
        for worker in workers:
            async with stub_of(worker.address) as stub:
                description = await stub.Describe(DESCRIBE, timeout=LONG)
            assert description.process_id == worker.process_id
            assert description.role == (worker_pb2.ROLE_DRAFT if worker.role is Role.DRAFT else worker_pb2.ROLE_TARGET)
            threads = 3 if worker.worker_id == "target-1" else 1
            assert psutil.Process(worker.process_id).environ()["OMP_NUM_THREADS"] == str(description.threads)
            assert description.threads == threads
            epochs.add(description.worker_epoch)
        assert len(epochs) == 3
    assert {worker_id for worker_id, _, _ in messages} == {"draft-0", "target-0", "target-1"}
    assert {message[1:] for message in messages} >= {
        ("starting", None),
        ("thinking", None),
        ("thinking", 1.0),
        ("up", 1.0),
    }
    assert not any(alive(worker.process_id) for worker in workers)


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="one processor")
@pytest.mark.parametrize("threads", [len(PROCESSORS), 1])
async def test_threads_that_fill_a_machine_keep_to_processors_of_their_own(threads: int, tmp_path: Path) -> None:
    """Those that compute, and not the first one, which answers calls meanwhile."""
    settings = {"model": str(save_tiny_pair("llama", tmp_path)[0]), "threads": threads, "kv_pages": 8}
    launch = WorkerLaunch(Role.TARGET, settings, threads=threads)
    async with WorkerLauncher([launch]) as launcher:
        worker = launcher.workers[0].process_id
        allowed = {thread.id: os.sched_getaffinity(thread.id) for thread in psutil.Process(worker).threads()}
    kept = {min(processors) for processors in allowed.values() if len(processors) == 1}
    assert kept == (PROCESSORS if threads > 1 else set())
    assert allowed[worker] == PROCESSORS


async def test_steps_run_in_order_and_the_server_stays_live() -> None:
    async with (
        WorkerLauncher([stand_in(Role.TARGET, step_seconds=2)]) as launcher,
        stub_of(launcher.workers[0].address) as stub,
    ):
        description = await stub.Describe(DESCRIBE, timeout=LONG)
        requests = [step(description, n, opening(n, sample=True)) for n in (1, 2, 3)]
        call = stub.Steps(iter(requests), timeout=LONG)
        replies = [await call.read()]
        # The second step runs now.
        second = asyncio.ensure_future(call.read())
        await stub.Describe(DESCRIBE, timeout=LONG)
        assert not second.done()
        replies += [await second, await call.read()]
        assert await call.read() is grpc.aio.EOF
        assert [reply.step_id for reply in replies] == [1, 2, 3]
        for reply in replies:
            assert list(reply.rows.tokens) == continuation(PROMPT, 1)
        assert replies[2].timings.queued > 2
        assert replies[2].timings.idle < 1

        # A stream of its own, as after a broken connection, repeats a step.
        assert await exchange(stub, [requests[2]]) == [replies[2]]


async def test_steps_of_a_broken_stream_that_wait_are_not_run() -> None:
    async with (
        WorkerLauncher([stand_in(Role.TARGET, step_seconds=1.5)]) as launcher,
        stub_of(launcher.workers[0].address) as stub,
    ):
        description = await stub.Describe(DESCRIBE, timeout=LONG)
        call = stub.Steps(iter([step(description, n, opening(n)) for n in (1, 2, 3, 4)]))
        assert (await call.read()).step_id == 1
        call.cancel()
        (reply,) = await exchange(stub, [step(description, 4, opening(40, sample=True))])
        assert list(reply.rows.tokens) == continuation(PROMPT, 1)
        assert (await stub.Describe(DESCRIBE)).free_pages >= 1000 - 3 * 2


async def test_worker_that_is_stopped_still_answers_what_has_arrived() -> None:
    async with (
        WorkerLauncher([stand_in(Role.TARGET, step_seconds=1)]) as launcher,
        stub_of(launcher.workers[0].address) as stub,
    ):
        description = await stub.Describe(DESCRIBE, timeout=LONG)
        call = stub.Steps()
        for step_id in (1, 2):
            await call.write(step(description, step_id, opening(step_id)))
        assert (await call.read()).step_id == 1
        os.kill(launcher.workers[0].process_id, signal.SIGTERM)
        assert (await call.read()).step_id == 2
        assert await call.read() is grpc.aio.EOF
        await until(lambda: not alive(launcher.workers[0].process_id))


async def test_a_lost_device_ends_its_worker_and_fails_nobody_else() -> None:
    """The sequence that brings it about fails with its second loss; others go on elsewhere, as after a kill."""
    async with (
        WorkerLauncher([stand_in(Role.TARGET, step_seconds=0.02)] * 3) as launcher,
        SchedulerService(SchedulerConfig(), scheduler_epoch=1, link_options=LINKS) as service,
    ):
        await service.workers.add([WorkerEndpoint(one.worker_id, one.role, one.address) for one in launcher.workers])
        others = [service.submit([20 + number, *PROMPT], 100) for number in range(6)]
        begun = [await anext(stream) for stream in others]
        with pytest.raises(SequenceFailedError, match="lost"):
            await anext(service.submit([*PROMPT, DEVICE_FAILS], 5))
        for number, (first, stream) in enumerate(zip(begun, others, strict=True)):
            rest = [token async for delta in stream for token in delta.tokens]
            assert [*first.tokens, *rest] == continuation([20 + number, *PROMPT], 100)
        assert service.statistics().workers_lost == 2
        await until(lambda: sum(alive(one.process_id) for one in launcher.workers) == 1)


def test_wrong_settings_are_named() -> None:
    async def run() -> None:
        with pytest.raises(ProcessStartError, match=r"^target-0: settings hold colour, must be among"):
            await WorkerLauncher([WorkerLaunch(Role.TARGET, {"model": "m", "colour": "red"})]).__aenter__()

    asyncio.run(run())
    for settings, message in (({}, "settings hold no model"), ({"model": "m", "dtype": "int3"}, "dtype is 'int3', ")):
        with pytest.raises(ValueError, match=message):
            EngineSettings.from_plain(settings)


@pytest.mark.parametrize(
    ("settings", "seconds", "told"),
    [
        ({"fail": "model: no such\n  folder"}, LONG, "target-0: model: no such folder$"),
        ({"die": "out of luck"}, LONG, "target-0: exit code 1: out of luck"),
        ({"die": "SIGKILL"}, LONG, r"target-0: killed by signal 9 \(if memory ran out: a smaller model"),
        ({"hang": 60}, 1.5, "target-[01]: not ready after 1.5 s"),
    ],
)
async def test_a_worker_that_does_not_start_says_why_and_leaves_nothing(
    settings: dict[str, Any], seconds: float, told: str
) -> None:
    launches = [stand_in(Role.TARGET, **settings), stand_in(Role.TARGET, hang=60)]
    launcher = WorkerLauncher(launches, start_timeout_seconds=seconds)
    with pytest.raises(ProcessStartError, match=told):
        await launcher.__aenter__()
    assert not any(alive(worker.process_id) for worker in launcher.workers if worker.process_id)


async def test_cancelled_start_leaves_nothing() -> None:
    launcher = WorkerLauncher([stand_in(Role.TARGET, hang=60)])
    start = asyncio.create_task(launcher.__aenter__())
    await until(lambda: bool(launcher.workers) and launcher.workers[0].process_id > 0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not alive(launcher.workers[0].process_id)


async def test_the_end_of_a_log_says_why_a_process_does_not_start(tmp_path: Path) -> None:
    log = tmp_path / "other.log"
    log.touch()
    os.truncate(log, 2**40)
    with log.open("a") as file:
        file.write("\n")
    child = ChildProcess("other", lambda port: Command("tests.nowhere", [], {}), log, lambda *_: None)
    with pytest.raises(ProcessStartError, match=r"other: exit code 1: .*No module named"):
        await child.start(LONG)
