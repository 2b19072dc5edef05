"""Brings a list of prompts to their end through one scheduler service."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from spool.deploy.errors import RunError, UsageError
from spool.deploy.offline.cell import Cell
from spool.deploy.offline.prompts import Prompt
from spool.deploy.offline.settings import SamplingSettings
from spool.deploy.progress import Reporter
from spool.engine.settings import BATCHED_TOKENS_ON_CPU
from spool.scheduler.config import SchedulerConfig
from spool.scheduler.messages import EmitTokens, FinishReason
from spool.scheduler.sampling import SamplingParameters
from spool.services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError
from spool.services.observability.observer import ServiceObserver
from spool.services.scheduler.service import SchedulerService, ServiceClosedError
from spool.services.scheduler.telemetry.statistics import StatisticsSnapshot
from spool.services.text.tokenizer import ModelTokenizer

_SECONDS_BETWEEN_LOOKS = 0.25


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to decode. It shares KV and texts with sequences of its `cache_scope`, empty or 32 bytes."""

    prompt: Prompt
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParameters
    cache_scope: bytes = b""


@dataclass(slots=True)
class Completion:
    """What came of a job; a digest for each token where they were asked for. It took so many verify `passes` after the
    prompt's, which committed `passed` tokens."""

    tokens: list[int] = field(default_factory=list)
    logits_digests: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    passes: int = 0
    passed: int = 0


class _Passes(ServiceObserver):
    """How many tokens each delivery of each sequence has. Streams do not tell: they merge what is not read at once."""

    def __init__(self) -> None:
        self.counts: defaultdict[int, list[int]] = defaultdict(list)

    def tokens_emitted(self, emissions: Sequence[EmitTokens]) -> None:
        for emission in emissions:
            self.counts[emission.sequence_id].append(len(emission.tokens))


def make_jobs(
    prompts: Sequence[Prompt], tokenizer: ModelTokenizer, sampling: SamplingSettings, max_positions: int
) -> list[Job]:
    """Raises `UsageError` for a prompt that leaves no room for an answer; one that leaves little gets a short one."""
    jobs = []
    for prompt in prompts:
        tokens = tuple(prompt.encode(tokenizer))
        room = max_positions - len(tokens)
        if room < 1:
            raise UsageError(
                f"{prompt.place}: the prompt has {len(tokens)} tokens, the model takes {max_positions} with the answer"
            )
        jobs.append(Job(prompt, tokens, min(sampling.max_tokens, room), sampling.parameters(prompt.index)))
    return jobs


def longest_lengths(jobs: Sequence[Job], config: SchedulerConfig) -> list[int]:
    """Positions, drafts included, of the sequences that need the most of them, as many as may run on a CPU."""
    lengths = sorted((len(job.tokens) + job.max_tokens + config.draft_length for job in jobs), reverse=True)
    return lengths[: config.running_on(BATCHED_TOKENS_ON_CPU)]


@dataclass(frozen=True, slots=True)
class DecodingPlan:
    """How one pass over the jobs is run; `title` is for the progress display.

    `warm_up` is decoded first, by the same scheduler, and counts nowhere.
    """

    title: str
    config: SchedulerConfig
    stop_token_ids: frozenset[int]
    drafting: bool = True
    logits_digests: bool = False
    warm_up: Sequence[Job] = ()


async def decode(
    cell: Cell,
    plan: DecodingPlan,
    jobs: Sequence[Job],
    reporter: Reporter,
    on_done: Callable[[int, Completion], None],
) -> StatisticsSnapshot:
    """Decodes all jobs; `on_done` gets each one's index in `jobs` and outcome as it ends.

    Raises `UsageError` for a job the workers refuse, `RunError` if one fails or the last target dies.
    """
    done = 0

    async with cell.service(plan.config, plan.drafting) as service:

        def look() -> None:
            cell.check_alive()
            reporter.run(plan.title, done, len(jobs), service.statistics())

        if plan.warm_up:
            async for _ in _completed(service, plan, plan.warm_up, cell.check_alive):
                pass
            service.reset_statistics()
        async with aclosing(_completed(service, plan, jobs, look)) as completed:
            async for index, completion in completed:
                on_done(index, completion)
                done += 1
        look()
        return service.statistics()


async def _completed(
    service: SchedulerService, plan: DecodingPlan, jobs: Sequence[Job], look: Callable[[], None]
) -> AsyncGenerator[tuple[int, Completion], None]:
    """Each job with its index as it ends; `look` is called every quarter of a second, and what it raises ends all."""
    # Enough that the queue never runs dry, and far from its limit.
    most = 2 * max(plan.config.max_running or 0, service.core.snapshot().max_running)
    left, running, due = iter(enumerate(jobs)), dict[asyncio.Task[Completion], int](), 0.0
    passes = _Passes()
    with service.observed(passes):
        try:
            while True:
                for index, job in itertools.islice(left, most - len(running)):
                    running[asyncio.create_task(_run_job(service, plan, job, passes))] = index
                if not running:
                    return
                ended, _ = await asyncio.wait(
                    running, timeout=_SECONDS_BETWEEN_LOOKS, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    yield running.pop(task), task.result()
                if time.monotonic() >= due:
                    look()
                    due = time.monotonic() + _SECONDS_BETWEEN_LOOKS
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _run_job(service: SchedulerService, plan: DecodingPlan, job: Job, passes: _Passes) -> Completion:
    completion = Completion()
    try:
        stream = service.submit(
            job.tokens,
            job.max_tokens,
            stop_token_ids=plan.stop_token_ids,
            sampling=job.sampling,
            logits_digests=plan.logits_digests,
            cache_scope=job.cache_scope,
        )
        async with stream:
            async for delta in stream:
                completion.tokens += delta.tokens
                completion.logits_digests += delta.logits_digests
    except AdmissionRefusedError as error:
        raise UsageError(f"{job.prompt.place}: {error}") from error
    except (SequenceFailedError, ServiceClosedError) as error:
        raise RunError(f"{job.prompt.place}: {error}") from error
    completion.finish_reason = stream.finish_reason
    # The first delivery is that of the prompt's pass.
    deliveries = passes.counts.pop(stream.sequence_id, [])[1:]
    completion.passes, completion.passed = len(deliveries), sum(deliveries)
    return completion
