"""Sequences end to end: scheduler service, draft and target processes, tokens that must equal the oracle's."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import FinishReason, Role
from services.backend.sequence_stream import SequenceFailedError, SequenceStream
from services.launch.launcher import RunningWorker, WorkerLaunch, WorkerLauncher
from services.scheduler.service import SchedulerService, ServiceClosedError
from services.scheduler.workers.pairing import PairingError
from services.scheduler.workers.worker_link import LinkOptions, WorkerEndpoint, WorkerUnreachableError
from tests.integration.workers.test_processes import stand_in
from tests.support.stand_in_worker import VOCABULARY, continuation
from tests.support.waiting import LONG, until

pytestmark = pytest.mark.slow

# Drafts always; `auto` would weigh what stand-in workers happen to cost.
DRAFTING = SchedulerConfig(policy=Policy.RAGGED)
LINKS = LinkOptions(connect_timeout=60, step_timeout=60, first_backoff=0.02, longest_backoff=0.2)


def endpoints(workers: Sequence[RunningWorker]) -> list[WorkerEndpoint]:
    return [WorkerEndpoint(worker.worker_id, worker.role, worker.address) for worker in workers]


@asynccontextmanager
async def cell(
    drafts: int = 1,
    targets: int = 1,
    config: SchedulerConfig | None = None,
    restart_seconds: float | None = None,
    links: LinkOptions = LINKS,
    **settings: Any,
) -> AsyncIterator[tuple[SchedulerService, WorkerLauncher]]:
    launches = [stand_in(Role.DRAFT, **settings)] * drafts + [stand_in(Role.TARGET, **settings)] * targets
    async with (
        WorkerLauncher(launches, restart_seconds=restart_seconds) as launcher,
        SchedulerService(config or DRAFTING, scheduler_epoch=time.time_ns(), link_options=links) as service,
    ):
        await service.workers.add(endpoints(launcher.workers))
        yield service, launcher


async def check(stream: SequenceStream, prompt: Sequence[int], count: int, begun: Sequence[int] = ()) -> None:
    """`begun` are the tokens that the test has read already."""
    assert [*begun, *await asyncio.wait_for(stream.collect(), LONG)] == continuation(prompt, count)
    assert stream.finish_reason is FinishReason.LENGTH


def test_prompt_lookup_drafts_without_a_model() -> None:
    async def run() -> None:
        # The draft has read the prompt long before the target has: one that is behind is not waited for.
        launches = [WorkerLaunch(Role.DRAFT, {"model": "ngram"}), stand_in(Role.TARGET, step_seconds=0.1)]
        async with (
            WorkerLauncher(launches) as launcher,
            SchedulerService(DRAFTING, scheduler_epoch=time.time_ns(), link_options=LINKS) as service,
        ):
            await service.workers.add(endpoints(launcher.workers))
            # Whatever comes after the 5 at the end, the two of them stand here too.
            prompt = [token for follower in range(100, VOCABULARY) for token in (5, follower)] + [5]
            await check(service.submit(prompt, 20), prompt, 20)
            assert service.statistics().drafted > 0
            assert not service.statistics().row_errors

    asyncio.run(run())


def test_deltas_carry_rounds_and_digests() -> None:
    async def run() -> None:
        async with cell() as (service, _):
            stream = service.submit([30, 31], 20, logits_digests=True, draft_length=3)
            deltas = [delta async for delta in stream]
            assert [token for delta in deltas for token in delta.tokens] == continuation([30, 31], 20)
            for delta in deltas:
                assert delta.logits_digests == tuple(token + 5 for token in delta.tokens)
                assert delta.drafted <= 3
            assert any(delta.accepted for delta in deltas)

    asyncio.run(run())


def test_hung_worker_is_lost_and_comes_back_only_when_it_answers() -> None:
    async def run() -> None:
        links = LinkOptions(connect_timeout=3, step_timeout=2, first_backoff=0.02, longest_backoff=0.1)
        async with cell(links=links, step_seconds=0.005) as (service, launcher):
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

    asyncio.run(run())


def test_closing_fails_what_is_unfinished() -> None:
    async def run() -> None:
        async with cell(step_seconds=0.01) as (service, _):
            stream = service.submit([1], 500)
            await anext(stream)
            await service.close("maintenance")
            with pytest.raises(SequenceFailedError, match="maintenance"):
                await stream.collect()
            with pytest.raises(ServiceClosedError, match="maintenance"):
                service.submit([1], 5)

    asyncio.run(run())


def test_worker_of_the_wrong_role_and_worker_that_is_not_there() -> None:
    async def run() -> None:
        links = LinkOptions(connect_timeout=5)
        async with (
            WorkerLauncher([stand_in(Role.TARGET)]) as launcher,
            SchedulerService(SchedulerConfig(), scheduler_epoch=1, link_options=links) as service,
        ):
            address = launcher.workers[0].address
            with pytest.raises(PairingError, match="worker a is target, must be draft"):
                await service.workers.add([WorkerEndpoint("a", Role.DRAFT, address)])
            with pytest.raises(WorkerUnreachableError, match=r"worker b at 127.0.0.1:1 does not answer"):
                await service.workers.add([WorkerEndpoint("b", Role.TARGET, "127.0.0.1:1")])

    asyncio.run(run())
