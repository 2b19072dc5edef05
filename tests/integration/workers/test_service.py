"""Sequences end to end: scheduler service, draft and target processes, tokens that must equal the oracle's."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

import grpc.aio
import pytest

from spool.engine.drafting.proposer import Lookup, Proposers
from spool.protos import worker_pb2
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import FinishReason, Role
from spool.services.backend.sequence_stream import SequenceFailedError, SequenceStream
from spool.services.launch.launcher import RunningWorker, WorkerLauncher
from spool.services.scheduler.service import SchedulerService, ServiceClosedError
from spool.services.scheduler.workers.worker_link import LinkOptions, WorkerEndpoint
from spool.services.worker.executor import StepExecutor
from spool.services.worker.process import NGRAM_MODEL
from spool.services.worker.server import WorkerServer
from tests.integration.workers.test_processes import stand_in
from tests.support.cells import running_cell
from tests.support.stand_in_worker import VOCABULARY, StandInEngine, continuation, target_executor
from tests.support.waiting import LONG, until

pytestmark = pytest.mark.slow

# Drafts always; `auto` would weigh what stand-in workers happen to cost.
DRAFTING = SchedulerConfig(policy=Policy.RAGGED)
LINKS = LinkOptions(connect_timeout=60, step_timeout=60, first_backoff=0.02, longest_backoff=0.2)


def endpoints(workers: Sequence[RunningWorker]) -> list[WorkerEndpoint]:
    return [WorkerEndpoint(worker.worker_id, worker.role, worker.address) for worker in workers]


async def check(stream: SequenceStream, prompt: Sequence[int], count: int, begun: Sequence[int] = ()) -> None:
    """`begun` are the tokens that the test has read already."""
    assert [*begun, *await asyncio.wait_for(stream.collect(), LONG)] == continuation(prompt, count)
    assert stream.finish_reason is FinishReason.LENGTH


async def test_prompt_lookup_drafts_without_a_model() -> None:
    engine = StandInEngine()
    engine.description = replace(engine.description, own_draft_id=NGRAM_MODEL)
    server = WorkerServer(StepExecutor(engine, proposer=Proposers(Lookup(1))))
    address = await server.start()
    async with SchedulerService(DRAFTING, scheduler_epoch=1, link_options=LINKS) as service:
        await service.workers.add([WorkerEndpoint("target-0", Role.TARGET, address)])
        # Whatever comes after the 5 at the end, the two of them stand here too.
        prompt = [token for follower in range(100, VOCABULARY) for token in (5, follower)] + [5]
        await check(service.submit(prompt, 20), prompt, 20)
        assert service.statistics().drafted > 0
        assert not service.statistics().row_errors
    await server.stop(0)


async def test_hung_worker_is_lost_and_comes_back_only_when_it_answers() -> None:
    links = LinkOptions(connect_timeout=3, step_timeout=2, first_backoff=0.02, longest_backoff=0.1)
    launches = [stand_in(role, step_seconds=0.005) for role in (Role.DRAFT, Role.TARGET)]
    async with (
        WorkerLauncher(launches) as launcher,
        SchedulerService(DRAFTING, scheduler_epoch=time.time_ns(), link_options=links) as service,
    ):
        await service.workers.add(endpoints(launcher.workers))
        stream = service.submit([30, 31], 100)
        begun = (await anext(stream)).tokens
        target = launcher.workers[1]
        os.kill(target.process_id, signal.SIGSTOP)
        await until(lambda: "target-0" not in service.workers.up)
        # An attempt to reach it again has failed before it goes on.
        await until(lambda: "does not answer" in service.workers.links["target-0"].reason)
        assert "target-0" not in service.workers.up
        os.kill(target.process_id, signal.SIGCONT)
        await check(stream, [30, 31], 100, begun)
        assert service.workers.up == {"draft-0", "target-0"}


class AnswersTwice(WorkerServer):
    async def Steps(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.StepRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.StepReply]:
        async with aclosing(super().Steps(request_iterator, context)) as replies:
            async for reply in replies:
                yield reply
                if reply.step_id:
                    yield reply


async def test_worker_that_answers_twice_is_lost_for_that_reason(caplog: pytest.LogCaptureFixture) -> None:
    server = AnswersTwice(target_executor(StandInEngine()))
    address = await server.start()
    async with SchedulerService(SchedulerConfig(), scheduler_epoch=1, link_options=LINKS) as service:
        await service.workers.add([WorkerEndpoint("target-0", Role.TARGET, address)])
        service.submit([30, 31], 100)
        await until(lambda: "is lost: it answered step 1, which awaits no answer" in caplog.text)
    await server.stop(0)


async def test_closing_fails_what_is_unfinished() -> None:
    async with running_cell(step_seconds=0.01) as cell:
        stream = cell.service.submit([1], 500)
        await anext(stream)
        await cell.service.close("maintenance")
        with pytest.raises(SequenceFailedError, match="maintenance"):
            await stream.collect()
        with pytest.raises(ServiceClosedError, match="maintenance"):
            cell.service.submit([1], 5)
