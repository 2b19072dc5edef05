"""Many sequences through few pages, on real models in real worker processes."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from engine.models.loading import load_target_engine
from engine.settings import EngineSettings
from scheduler.config import SchedulerConfig
from scheduler.messages import Role, SequenceRequest
from scheduler.sampling import SamplingParameters
from services.launch.launcher import WorkerLaunch, WorkerLauncher
from services.scheduler.service import SchedulerService
from services.scheduler.workers.worker_link import WorkerEndpoint
from services.worker.executor import TargetStepExecutor
from tests.support.in_process import run_in_process
from tests.support.tiny_models import VOCABULARY, save_tiny_pair

pytestmark = pytest.mark.slow

SEQUENCES, AT_ONCE, PAGE_SIZE = 80, 10, 16
LONGEST_PROMPT, MAX_TOKENS = 40, 48
ROUNDS = 2
# Bytes. Seven rounds grew a worker by 0.15 MiB.
ALLOCATORS_MAY_KEEP = 4 << 20


def requests() -> list[SequenceRequest]:
    rng = random.Random(11)
    return [
        SequenceRequest(
            sequence_id=index,
            prompt=tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, LONGEST_PROMPT))),
            max_tokens=rng.randint(1, MAX_TOKENS),
            sampling=SamplingParameters(temperature=rng.choice((0.0, 0.8)), seed=index),
        )
        for index in range(SEQUENCES)
    ]


def test_sequences_through_pages_for_an_eighth_of_them(tmp_path: Path) -> None:
    """All finish with exactly their tokens, some after giving up their pages, and no worker's memory grows."""
    wanted = requests()
    target, draft = save_tiny_pair("llama", tmp_path)
    mean_pages = sum(-(-(len(r.prompt) + r.max_tokens) // PAGE_SIZE) for r in wanted) / SEQUENCES
    settings = EngineSettings(str(target), threads=1, page_size=PAGE_SIZE, kv_pages=round(mean_pages * AT_ONCE))

    roomy = EngineSettings(str(target), threads=1, page_size=PAGE_SIZE, kv_pages=400)
    exclusive = TargetStepExecutor(load_target_engine(roomy, lambda *_: None))
    expected = run_in_process(
        SchedulerConfig(batch_size=1, max_running=1, draft_length=0, max_queued_sequences=SEQUENCES),
        {"target": exclusive},
        wanted,
    )

    async def run() -> None:
        launches = [
            WorkerLaunch(Role.TARGET, asdict(settings), threads=1),
            WorkerLaunch(Role.DRAFT, asdict(settings) | {"model": str(draft)}, threads=1),
        ]
        config = SchedulerConfig(max_running=128, max_queued_sequences=SEQUENCES)
        async with (
            WorkerLauncher(launches) as launcher,
            SchedulerService(config, scheduler_epoch=time.time_ns()) as service,
        ):
            workers = launcher.workers
            await service.workers.add([WorkerEndpoint(w.worker_id, w.role, w.address) for w in workers])
            processes = [psutil.Process(worker.process_id) for worker in workers]

            async def collect(request: SequenceRequest) -> list[int]:
                return await service.submit(request.prompt, request.max_tokens, sampling=request.sampling).collect()

            memory = []
            for _ in range(ROUNDS):
                again = [collect(request) for request in wanted]
                assert await asyncio.gather(*again) == [expected[r.sequence_id].tokens for r in wanted]
                memory.append([process.memory_info().rss for process in processes])
            assert service.core.snapshot().preemptions > 0
            service.core.check_integrity()
            for first, *later in zip(*memory, strict=True):
                assert min(later) - first < ALLOCATORS_MAY_KEEP, f"grew by {(min(later) - first) >> 20} MiB"

    asyncio.run(run())
