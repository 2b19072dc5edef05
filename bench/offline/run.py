"""`python -m bench.offline`: the speed of decoding a list of prompts, by Spool and by other systems, cell by cell."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import eq
from typing import Any

from bench.offline.grid import BenchSettings, GridPoint, grid_points
from bench.offline.peers import PeerModels, Peers
from bench.offline.results import Measurement, by_domain, cell_line, domain_line, summarise
from bench.record import origin
from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.errors import RunError, UsageError
from spool.deploy.event_loop import run_until_interrupted
from spool.deploy.models import ReadyModels, fetch, prepare_models
from spool.deploy.offline.cell import Cell, running_cell
from spool.deploy.offline.decoding import Completion, DecodingPlan, Job, decode, longest_lengths, make_jobs
from spool.deploy.offline.prompts import Prompt, load_prompts
from spool.deploy.offline.settings import SamplingSettings
from spool.deploy.progress import Reporter, say
from spool.deploy.workers import worker_devices
from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import Role
from spool.services.launch.process_tuning import keep_loaded_objects

_WARM_UP_TOKENS = 64


def bench_offline(config: SpoolConfig, settings: BenchSettings, sampling: SamplingSettings) -> int:
    """Exit code 0. Raises `UsageError` and `RunError`; the file has whatever was measured before."""
    warmest = max(settings.temperatures or [sampling.temperature])
    if settings.peer and warmest > 0:
        raise UsageError(f"temperature is {warmest}, must be 0 with --peer: others draw other random numbers")
    prompts = bench_prompts(settings)
    reporter = Reporter()
    models = prepare_models(config, reporter)
    jobs = make_jobs(prompts, models.tokenizer, sampling, models.max_positions)
    run = _Run(config, settings, sampling, models, jobs, reporter)
    run_until_interrupted(run.run())
    result = run.result()
    lines = [line for cell in result["cells"] for line in (cell_line(cell), domain_line(cell)) if line is not None]
    say("\n".join([*lines, f"the result is in {settings.output}"]))
    return 0


def bench_prompts(settings: BenchSettings) -> list[Prompt]:
    """All prompts, or `count` of them, evenly spaced. Raises `UsageError`."""
    prompts = load_prompts(settings.prompts, None)
    if settings.count is None:
        return prompts
    return prompts[:: max(1, len(prompts) // settings.count)][: settings.count]


@dataclass
class _Run:
    """Measures every cell `repeats` times."""

    config: SpoolConfig
    settings: BenchSettings
    sampling: SamplingSettings
    models: ReadyModels
    jobs: list[Job]
    reporter: Reporter
    measurements: list[Measurement] = field(default_factory=list)
    expected: dict[GridPoint, list[list[int]]] = field(default_factory=dict)
    origin: dict[str, object] = field(default_factory=lambda: origin(shlex.join(["spool", *sys.argv[1:]])))

    @cached_property
    def points(self) -> list[GridPoint]:
        settings, draft = self.settings, self.config.models.draft_name
        systems = [*settings.policy, *settings.peer]
        temperatures = settings.temperatures or [self.sampling.temperature]
        return grid_points(systems, settings.batch_size, draft, settings.draft_length, temperatures)

    async def run(self) -> None:
        points = self.points
        references = dict.fromkeys(point.reference for point in points if point.reference not in points)
        spool_points = [point for point in (*references, *points) if point.system.is_spool]
        lengths = max((longest_lengths(self.jobs, self._scheduling(point)) for point in spool_points), key=sum)
        async with AsyncExitStack() as stack:
            # Plain decoding leaves the draft idle.
            cell = await stack.enter_async_context(running_cell(self.config, lengths, self.reporter))
            peers = self._peers()
            stack.callback(peers.stop)
            keep_loaded_objects()
            for point in references:
                await self._measure(point, None, cell, peers)
            for repeat, point in self._rounds():
                await self._measure(point, repeat, cell, peers)

    def result(self) -> dict[str, Any]:
        config = self.config
        sections = {"models": config.models, "engine": config.engine, "sampling": self.sampling, "cells": self.settings}
        return self.origin | {
            "settings": {name: one.model_dump(mode="json") for name, one in sections.items()},
            "prompts": len(self.jobs),
            "prompt_tokens": sum(len(job.tokens) for job in self.jobs),
            "cells": summarise(self.measurements),
            "measurements": [measurement.to_json() for measurement in self.measurements],
        }

    def _rounds(self) -> Iterator[tuple[int, GridPoint]]:
        """Every other repeat runs backwards, so that neither of two neighbours is always the later one."""
        for repeat in range(self.settings.repeats):
            for point in self.points[:: -1 if repeat % 2 else 1]:
                yield repeat, point

    def _peers(self) -> Peers:
        models = self.config.models
        draft = fetch(models.draft_name, Role.DRAFT, self.reporter) if models.drafts_with_model else ""
        return Peers(
            PeerModels(
                target=str(self.models.target_folder),
                draft=str(draft),
                dtype=self.settings.peer_dtype or models.dtype,
                device=worker_devices(models.device, [1])[0],
                threads=self.config.threads(Role.TARGET),
                max_rows=max(self.settings.batch_size),
                stop_token_ids=sorted(self.models.tokenizer.stop_token_ids),
                prompts=[job.tokens for job in self.jobs],
                max_tokens=[job.max_tokens for job in self.jobs],
            ),
            self.config.engine.cpu_isa,
            self.settings.vllm_python,
        )

    async def _measure(self, point: GridPoint, repeat: int | None, cell: Cell, peers: Peers) -> None:
        """Without `repeat` only for the output, with which the output of other cells is compared."""
        if point.system.is_spool:
            outputs, found = await self._measure_spool(point, repeat, cell)
        else:
            outputs, seconds = await asyncio.to_thread(peers.measure, point)
            found = Measurement(point, 0, sum(map(len, outputs)), seconds, 0.0, [])
        if point == point.reference:
            self.expected.setdefault(point, outputs)
        if repeat is None:
            return
        expected, plain = self.expected[point.reference], self.expected[point.baseline.reference]
        different = [number for number, output in enumerate(outputs) if output != expected[number]]
        match, like = 1 - len(different) / len(outputs), sum(map(eq, outputs, plain)) / len(outputs)
        found = replace(found, repeat=repeat, exact_match=match, different=different, like_spool=like)
        self.measurements.append(found)
        self.settings.output.write_text(json.dumps(self.result(), indent=2) + "\n", encoding="utf-8")
        say(f"{point}, repeat {repeat + 1}: {found.tokens_per_second:.1f} tokens/s, same output {match:.1%}")

    async def _measure_spool(
        self, point: GridPoint, repeat: int | None, cell: Cell
    ) -> tuple[list[list[int]], Measurement]:
        completions = [Completion() for _ in self.jobs]
        sampling = self.sampling.model_copy(update={"temperature": point.temperature})
        # Nothing is known of what other cells have decoded.
        scope = hashlib.sha256(f"{point}, {repeat}".encode()).digest()
        jobs, before = (
            [
                replace(job, sampling=sampling.parameters(first + job.prompt.index), cache_scope=scope)
                for job in self.jobs
            ]
            for first in (0, len(self.jobs))
        )
        # The scheduler warms up too: it learns what steps cost, what is accepted and how long outputs are.
        warm_up = [
            replace(job, max_tokens=min(job.max_tokens, _WARM_UP_TOKENS), cache_scope=b"")
            for job in jobs[: 2 * point.batch_size]
        ]
        plan = DecodingPlan(
            title=str(point),
            config=self._scheduling(point),
            stop_token_ids=self.models.tokenizer.stop_token_ids,
            drafting=point.system.drafts,
            warm_up=warm_up,
        )
        if self.settings.seen_before:
            await decode(cell, replace(plan, title=f"{point}, before"), before, self.reporter, lambda *_: None)
        found = await decode(cell, plan, jobs, self.reporter, completions.__setitem__)
        if found.workers_lost:
            raise RunError(f"a worker died while {point} was measured")
        measurement = Measurement(
            point,
            repeat=0,
            tokens=found.tokens,
            seconds=found.seconds,
            exact_match=0.0,
            different=[],
            statistics=found.to_json(),
            domains=by_domain((job.prompt for job in jobs), completions),
        )
        return [completion.tokens for completion in completions], measurement

    def _scheduling(self, point: GridPoint) -> SchedulerConfig:
        """Plain decoding is the same engine without drafts, in the batches that `auto` forms."""
        drafts = point.system.drafts
        batches = self.settings.max_running_batches
        sizes: dict[str, Any] = {"batch_size": point.batch_size, "draft_length": point.draft_length}
        sizes["max_running"] = None if batches is None else batches * point.batch_size
        scheduling = self.config.scheduling.model_copy(update=sizes)
        config = scheduling.scheduler_config(drafts, policy=Policy(point.system.value) if drafts else Policy.AUTO)
        # The reference decodes one sequence at a time.
        return replace(config, max_running=1) if point == point.reference else config
