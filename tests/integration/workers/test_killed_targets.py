"""Targets as processes, with drafting heads, windows or experts: one dies or leaves in the middle of all, and the text
stays what it was."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from spool.engine.settings import EngineSettings
from spool.scheduler.config import KvMovement, Policy, SchedulerConfig
from spool.scheduler.messages import Role
from spool.scheduler.sampling import SamplingParameters
from spool.services.launch.launcher import RunningWorker, WorkerLaunch, WorkerLauncher
from spool.services.scheduler.service import SchedulerService
from spool.services.scheduler.workers.worker_link import WorkerEndpoint
from tests.support.agreeing_heads import save_agreeing_pair
from tests.support.cells import LINKS
from tests.support.changed_workers import slow_steps
from tests.support.tiny_models import VOCABULARY, WINDOWED, save_tiny_pair
from tests.support.waiting import LONG, until

pytestmark = pytest.mark.slow

# So long that targets wait for the draft worker on a busy machine as well.
CONFIG = SchedulerConfig(policy=Policy.RAGGED, kv_movement=KvMovement.ALWAYS, wait_bound_steps=100)
PROMPTS = [[(3 * index + place) % VOCABULARY for place in range(66 + 7 * index)] for index in range(5)]
Output = list[tuple[int, int]]
"""Tokens, with the digests of their logits."""


def launch(model: Path, role: Role = Role.TARGET, head: str | None = None) -> WorkerLaunch:
    settings = EngineSettings(str(model), kv_pages=200, threads=1, draft_head=head, dtype="bfloat16")
    return WorkerLaunch(role, asdict(settings), threads=1, environment=slow_steps(0.01))


async def decode(
    service: SchedulerService, max_tokens: int, then: Callable[[], Awaitable[None]] | None = None
) -> tuple[list[Output], tuple[int, int]]:
    """The outputs, and how many tokens were drafted and accepted after `then`, which comes when all have begun."""
    outputs: list[Output] = [[] for _ in PROMPTS]
    drafted = accepted = 0
    samplings = [SamplingParameters(temperature=0.7 * (n % 2), seed=n) for n in range(len(PROMPTS))]
    streams = [
        service.submit(prompt, max_tokens, sampling=sampling, logits_digests=True)
        for prompt, sampling in zip(PROMPTS, samplings, strict=True)
    ]
    for output, stream in zip(outputs, streams, strict=True):
        delta = await anext(stream)
        output.extend(zip(delta.tokens, delta.logits_digests, strict=True))
    if then is not None:
        await then()
    for output, stream in zip(outputs, streams, strict=True):
        async for delta in stream:
            output.extend(zip(delta.tokens, delta.logits_digests, strict=True))
            drafted, accepted = drafted + delta.drafted, accepted + delta.accepted
    return outputs, (drafted, accepted)


@asynccontextmanager
async def started(launches: list[WorkerLaunch]) -> AsyncIterator[tuple[SchedulerService, list[RunningWorker]]]:
    async with (
        WorkerLauncher(launches) as launcher,
        SchedulerService(CONFIG, scheduler_epoch=1, link_options=LINKS) as service,
    ):
        await service.workers.add([WorkerEndpoint(one.worker_id, one.role, one.address) for one in launcher.workers])
        yield service, launcher.workers


HEADS = ("eagle", "mtp", "dflash", "peagle")
MORE = [pytest.param(family, marks=pytest.mark.long) for family in WINDOWED if family != "gemma3_text"]


@pytest.mark.parametrize("kind", [*HEADS, "gemma3_text", *MORE])
async def test_targets_that_are_killed_and_leave_change_no_bit(kind: str, tmp_path: Path) -> None:
    """Where there are windows, prompts are longer than three of them."""
    if kind in HEADS:
        target, head = save_agreeing_pair(tmp_path, kind)
        launches = [launch(target, head=head)] * 3
    else:
        target, draft = save_tiny_pair(kind, tmp_path, **WINDOWED[kind])
        launches = [*[launch(target)] * 3, launch(draft, Role.DRAFT)]
    async with started([launch(target)]) as (service, _):
        plain, counts = await decode(service, 200)
    assert counts == (0, 0)
    assert [len(output) for output in plain] == [200] * len(PROMPTS)

    async with started(launches) as (service, workers):

        async def kill_and_leave() -> None:
            os.kill(workers[0].process_id, signal.SIGKILL)
            await until(lambda: service.statistics().workers_lost == 1)
            await service.remove_worker(workers[1].worker_id, LONG)

        outputs, (drafted, accepted) = await decode(service, 200, kill_and_leave)
        assert outputs == plain
        assert service.core.snapshot().moves.moves > 0
        # A "peagle" one knows the first token of each proposal alone.
        assert accepted > (0.8 if kind in HEADS and kind != "peagle" else 0.05) * drafted > 20
