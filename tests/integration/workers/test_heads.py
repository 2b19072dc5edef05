"""Targets with drafting heads as processes: one dies or leaves in the middle of all, and the text stays what it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from engine.settings import EngineSettings
from scheduler.config import KvMovement, Policy, SchedulerConfig
from scheduler.messages import Role
from scheduler.sampling import SamplingParameters
from services.launch.launcher import RunningWorker, WorkerLaunch, WorkerLauncher
from services.scheduler.service import SchedulerService
from services.scheduler.workers.worker_link import WorkerEndpoint
from tests.support.agreeing_heads import save_agreeing_pair
from tests.support.cells import LINKS
from tests.support.changed_workers import slow_steps
from tests.support.tiny_models import VOCABULARY
from tests.support.waiting import LONG

pytestmark = pytest.mark.slow

CONFIG = SchedulerConfig(policy=Policy.RAGGED, kv_movement=KvMovement.ALWAYS)
PROMPTS = [[(3 * index + place) % VOCABULARY for place in range(20 + 7 * index)] for index in range(5)]
Output = list[tuple[int, int]]
"""Tokens, with the digests of their logits."""


def launch(target: Path, head: str | None) -> WorkerLaunch:
    settings = EngineSettings(str(target), kv_pages=200, threads=1, draft_head=head, dtype="bfloat16")
    return WorkerLaunch(Role.TARGET, asdict(settings), threads=1, environment=slow_steps(0.01))


async def decode(
    launches: list[WorkerLaunch], then: Callable[[SchedulerService, list[RunningWorker]], object] | None = None
) -> tuple[list[Output], tuple[int, int], SchedulerService]:
    """The outputs, and how many tokens were drafted and accepted after `then`, which comes when all have begun."""
    outputs: list[Output] = [[] for _ in PROMPTS]
    drafted = accepted = 0
    async with (
        WorkerLauncher(launches) as launcher,
        SchedulerService(CONFIG, scheduler_epoch=1, link_options=LINKS) as service,
    ):
        await service.workers.add([WorkerEndpoint(one.worker_id, one.role, one.address) for one in launcher.workers])
        streams = [
            service.submit(
                prompt, 200, sampling=SamplingParameters(temperature=0.7 * (n % 2), seed=n), logits_digests=True
            )
            for n, prompt in enumerate(PROMPTS)
        ]
        for output, stream in zip(outputs, streams, strict=True):
            delta = await anext(stream)
            output.extend(zip(delta.tokens, delta.logits_digests, strict=True))
        if then is not None and (wait := then(service, launcher.workers)) is not None:
            await wait  # type: ignore[misc]
        for output, stream in zip(outputs, streams, strict=True):
            async for delta in stream:
                output.extend(zip(delta.tokens, delta.logits_digests, strict=True))
                drafted, accepted = drafted + delta.drafted, accepted + delta.accepted
        return outputs, (drafted, accepted), service


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
async def test_a_target_that_is_killed_or_leaves_changes_no_bit(tmp_path: Path, kind: str) -> None:
    target, head = save_agreeing_pair(tmp_path, kind)
    plain, counts, _ = await decode([launch(target, None)])
    assert counts == (0, 0)
    assert [len(output) for output in plain] == [200] * len(PROMPTS)

    def kill(service: SchedulerService, workers: list[RunningWorker]) -> None:
        os.kill(workers[0].process_id, signal.SIGKILL)

    killed, (drafted, accepted), _ = await decode([launch(target, head), launch(target, head)], kill)
    assert killed == plain
    assert accepted > 0.8 * drafted > 200

    def leave(service: SchedulerService, workers: list[RunningWorker]) -> object:
        return service.remove_worker(workers[0].worker_id, LONG)

    moved, (drafted, accepted), service = await decode([launch(target, head), launch(target, head)], leave)
    assert service.core.snapshot().moves.moves > 0
    assert moved == plain
    assert accepted > 0.8 * drafted > 200
