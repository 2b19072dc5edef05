"""Brings a list of prompts to their end through one scheduler service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from deploy.errors import RunError, UsageError
from deploy.offline.cell import Cell
from deploy.offline.prompts import Prompt
from deploy.offline.settings import SamplingSettings
from deploy.progress import Reporter
from engine.settings import BATCHED_TOKENS_ON_CPU
from scheduler.config import SchedulerConfig
from scheduler.messages import FinishReason
from scheduler.sampling import SamplingParameters
from services.backend.sequence_stream import AdmissionRefusedError, SequenceFailedError
from services.scheduler.service import SchedulerService, ServiceClosedError
from services.scheduler.telemetry.statistics import StatisticsSnapshot
from services.text.tokenizer import ModelTokenizer

_SECONDS_BETWEEN_REPORTS = 0.25


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to decode."""

    prompt: Prompt
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParameters


@dataclass(slots=True)
class Completion:
    """What came of a job; a digest for each token where they were asked for."""

    tokens: list[int] = field(default_factory=list)
    logits_digests: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


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

    def count(index: int, completion: Completion) -> None:
        nonlocal done
        on_done(index, completion)
        done += 1

    async with cell.service(plan.config, plan.drafting) as service:

        def report() -> None:
            reporter.run(plan.title, done, len(jobs), service.statistics())

        try:
            if plan.warm_up:
                async with _every(_SECONDS_BETWEEN_REPORTS, cell.check_alive), asyncio.TaskGroup() as group:
                    await _submit_all(service, plan, plan.warm_up, group, lambda *_: None)
                service.reset_statistics()
            async with _every(_SECONDS_BETWEEN_REPORTS, cell.check_alive, report), asyncio.TaskGroup() as group:
                await _submit_all(service, plan, jobs, group, count)
        except* (RunError, UsageError) as errors:
            raise _first(errors) from None
        report()
        return service.statistics()


async def _submit_all(
    service: SchedulerService,
    plan: DecodingPlan,
    jobs: Sequence[Job],
    group: asyncio.TaskGroup,
    on_done: Callable[[int, Completion], None],
) -> None:
    # Enough that the queue never runs dry, and far from its limit.
    places = asyncio.Semaphore(2 * max(plan.config.max_running or 0, service.core.snapshot().max_running))

    async def run(index: int, job: Job) -> None:
        try:
            on_done(index, await _run_job(service, plan, job))
        finally:
            places.release()

    for index, job in enumerate(jobs):
        await places.acquire()
        group.create_task(run(index, job))


async def _run_job(service: SchedulerService, plan: DecodingPlan, job: Job) -> Completion:
    completion = Completion()
    try:
        stream = service.submit(
            job.tokens,
            job.max_tokens,
            stop_token_ids=plan.stop_token_ids,
            sampling=job.sampling,
            logits_digests=plan.logits_digests,
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
    return completion


@asynccontextmanager
async def _every(seconds: float, *actions: Callable[[], None]) -> AsyncIterator[None]:
    """Does the actions again and again while the block runs; what one of them raises ends the block."""

    async def repeat() -> None:
        while True:
            for action in actions:
                action()
            await asyncio.sleep(seconds)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(repeat())
        try:
            yield
        finally:
            task.cancel()


def _first(errors: BaseExceptionGroup) -> BaseException:
    """The first single exception in a tree of groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
