"""Gateways' sessions with a scheduler, over gRPC: everything comes back right, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from spool.protos import scheduler_pb2, scheduler_pb2_grpc
from spool.scheduler.config import SchedulerConfig
from spool.scheduler.messages import RefusalCause, Role
from spool.services.backend.interface import BackendUnavailableError, DeadlineExceededError, GenerationRequest
from spool.services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError
from spool.services.rpc.protocol_version import SPOKEN
from spool.services.scheduler_client.cell_link import ClientOptions
from tests.support.cells import (
    SESSIONS,
    Whereabouts,
    check,
    client,
    prompt_of,
    read,
    request_of,
    running_cell,
    running_scheduler,
    running_worker,
)
from tests.support.stand_in_worker import MAX_LENGTH, STEP_FAILS, VOCABULARY, continuation
from tests.support.waiting import LONG, until

pytestmark = pytest.mark.slow

# No more than 5 tokens come out of a draft step and a verify step, so ENDLESS tokens take at least 7 seconds.
SLOW = {"step_seconds": 0.01}
ENDLESS = 1900


def submission(request_id: int, count: int, **fields: object) -> scheduler_pb2.SequenceSubmission:
    return scheduler_pb2.SequenceSubmission(
        request_id=request_id,
        prompt=prompt_of(request_id),
        max_tokens=count,
        **fields,  # type: ignore[arg-type]
    )


def opening(*submissions: scheduler_pb2.SequenceSubmission) -> scheduler_pb2.SessionRequest:
    first = scheduler_pb2.SessionOpening(gateway_id="raw", protocol_version=SPOKEN.newest)
    return scheduler_pb2.SessionRequest(opening=first, submissions=submissions)


async def events_of(call: AsyncIterator[scheduler_pb2.SessionReply]) -> AsyncIterator[scheduler_pb2.SequenceEvent]:
    async for reply in call:
        for event in reply.events:
            yield event


async def test_refusals_failures_and_deadlines_are_told_apart() -> None:
    config = SchedulerConfig(max_running=1, max_queued_sequences=1)
    async with running_cell(config=config, **SLOW) as cell, client(cell.resolve) as backend:
        with pytest.raises(AdmissionRefusedError, match=f"the limit is {MAX_LENGTH}") as refusal:
            await backend.submit(GenerationRequest((1, 2), MAX_LENGTH))
        assert refusal.value.cause is RefusalCause.TOO_LONG
        with pytest.raises(SequenceFailedError, match=f"must be below vocabulary_size {VOCABULARY}"):
            await read(await backend.submit(GenerationRequest((VOCABULARY,), 5)))
        with pytest.raises(SequenceFailedError, match="the step exploded"):
            await read(await backend.submit(GenerationRequest((30, STEP_FAILS), 5)))

        running = await backend.submit(request_of(1, ENDLESS))
        await anext(running)
        waiting = await backend.submit(request_of(2, 5))
        with pytest.raises(AdmissionRefusedError) as refusal:
            await backend.submit(request_of(3, 5))
        assert refusal.value.cause is RefusalCause.QUEUE_FULL
        assert refusal.value.retry_after_seconds is not None
        assert refusal.value.retry_after_seconds >= 1
        waiting.cancel()
        with pytest.raises(DeadlineExceededError, match=r"within its 0.2 s"):
            await read(await backend.submit(request_of(3, 5, deadline_seconds=0.2)))
        running.cancel()
        await check(backend, 4, 5)
        assert cell.live_sequences == 0


# The less a channel takes on its own, the sooner the scheduler feels that nobody reads.
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]


async def test_gateway_that_does_not_read_stalls_nobody() -> None:
    numbers, count = range(24), 500
    async with (
        running_cell() as cell,
        client(cell.resolve) as backend,
        grpc.aio.insecure_channel(cell.resolve.address, options=NARROW) as channel,
    ):
        deaf = scheduler_pb2_grpc.SchedulerStub(channel).Session()
        await deaf.write(opening(*(submission(number, count) for number in numbers)))
        await until(lambda: cell.live_sequences > 0)
        async with asyncio.timeout(2 * LONG):
            await check(backend, 0, 20)
            assert cell.live_sequences > 0
            while cell.live_sequences:
                await check(backend, 1, 20)
        # What it did not read has been merged, and is all there when it reads at last.
        outputs: dict[int, list[int]] = {number: [] for number in numbers}
        events = ended = 0
        async for event in events_of(deaf):
            events += 1
            outputs[event.request_id].extend(event.tokens)
            ended += event.WhichOneof("end") is not None
            if ended == len(numbers):
                break
        assert outputs == {number: continuation(prompt_of(number), count) for number in numbers}
        assert events < cell.service.statistics().rounds / 4
        deaf.cancel()


async def test_no_target_for_long_is_told_to_new_and_old_sequences() -> None:
    sessions = replace(SESSIONS, refuse_without_target_seconds=0.2, fail_without_target_seconds=0.8)
    async with running_cell(sessions=sessions, **SLOW) as cell, client(cell.resolve) as backend:
        waiting = await backend.submit(request_of(1, ENDLESS))
        # It has no other target to go to, and does not end in this time.
        await cell.workers[1].registration.leave(2)
        with pytest.raises(BackendUnavailableError, match=r"no target worker has been up for 0.8 s"):
            await asyncio.wait_for(read(waiting), LONG)
        with pytest.raises(BackendUnavailableError, match="no target worker has been up"):
            await backend.submit(request_of(2, 5))
        assert cell.live_sequences == 0


async def test_without_a_target_there_is_no_model() -> None:
    options = ClientOptions(first_model_timeout=0.3)
    async with running_cell(targets=0) as cell, client(cell.resolve, options=options) as backend:
        await until(lambda: backend.connected)
        with pytest.raises(BackendUnavailableError, match="no target worker is up"):
            await backend.model()


async def test_a_gateway_that_is_new_waits_for_its_first_model() -> None:
    resolve = Whereabouts()
    async with client(resolve) as backend:
        asked = asyncio.create_task(backend.model())
        async with running_scheduler(resolve):
            await until(lambda: backend.connected)
            assert not asked.done()
            async with running_worker("target-0", Role.TARGET, resolve):
                assert (await asyncio.wait_for(asked, LONG)).model_id == "stand-in"


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([scheduler_pb2.SessionRequest()], "the first message has no opening"),
        ([opening(), opening()], "the session is open already"),
        ([opening(submission(1, 900), submission(1, 5))], "request_id 1 is taken"),
    ],
)
async def test_session_that_breaks_the_rules_is_ended(
    requests: list[scheduler_pb2.SessionRequest], message: str
) -> None:
    async with running_cell(**SLOW) as cell, grpc.aio.insecure_channel(cell.resolve.address) as channel:
        call = scheduler_pb2_grpc.SchedulerStub(channel).Session()
        for request in requests:
            await call.write(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in (caught.value.details() or "")
        assert cell.live_sequences == 0
