"""`spool bench offline`: the speed of decoding a list of prompts, by Spool and by other systems, cell by cell."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from rich.console import Console

from bench.offline.grid import GridPoint, grid_points
from bench.offline.options import BenchSettings
from bench.offline.peers import PeerModels, Peers
from bench.offline.results import Measurement, cells_table, summarise
from bench.record import origin
from deploy.config.spool_config import SpoolConfig
from deploy.errors import RunError, UsageError
from deploy.event_loop import run_until_interrupted
from deploy.models import ReadyModels, fetch, prepare_models
from deploy.offline.cell import Cell, running_cell
from deploy.offline.decoding import Completion, DecodingPlan, Job, decode, longest_lengths, make_jobs
from deploy.offline.prompts import Prompt, load_prompts
from deploy.offline.settings import SamplingSettings
from deploy.progress import Reporter
from deploy.workers import worker_devices
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role
from services.launch.process_tuning import keep_loaded_objects

_WARM_UP_TOKENS = 64
_WIDTH = 180


def bench_offline(config: SpoolConfig, settings: BenchSettings, sampling: SamplingSettings) -> int:
    """Exit code 0. Raises `UsageError` and `RunError`; the file has whatever was measured before."""
    if settings.peer and sampling.temperature > 0:
        raise UsageError(
            f"temperature is {sampling.temperature}, must be 0 with --peer: others draw other random numbers"
        )
    prompts = bench_prompts(settings)
    console = Console(file=sys.stderr)
    reporter = Reporter()
    models = prepare_models(config, reporter)
    jobs = make_jobs(prompts, models.tokenizer, sampling, models.max_positions)
    run = _Run(config, settings, sampling, models, jobs, reporter, console)
    run_until_interrupted(run.run())
    result = run.result()
    # Tables are not cut to the width of a terminal where there is none.
    wide = console if console.is_terminal else Console(file=sys.stderr, width=_WIDTH)
    wide.print(cells_table(result["cells"]))
    console.print(f"the result is in {settings.output}", highlight=False, markup=False)
    return 0


def bench_prompts(settings: BenchSettings) -> list[Prompt]:
    """All prompts, or `count` of them, evenly spaced. Raises `UsageError`."""
    prompts = load_prompts(settings.prompts, None)
    if settings.count is None:
        return prompts
    return prompts[:: max(1, len(prompts) // settings.count)][: settings.count]


class _Run:
    """Measures every cell `repeats` times."""

    def __init__(
        self,
        config: SpoolConfig,
        settings: BenchSettings,
        sampling: SamplingSettings,
        models: ReadyModels,
        jobs: list[Job],
        reporter: Reporter,
        console: Console,
    ) -> None:
        self._config = config
        self._settings = settings
        self._sampling = sampling
        self._models = models
        self._jobs = jobs
        self._reporter = reporter
        self._console = console
        self._origin = origin(shlex.join(["spool", *sys.argv[1:]]))
        self._measurements: list[Measurement] = []
        self._expected: dict[GridPoint, list[list[int]]] = {}
        self._points = grid_points(
            [*settings.policy, *settings.peer], settings.batch_size, config.models.draft_name, settings.draft_length
        )

    async def run(self) -> None:
        points = self._points
        references = dict.fromkeys(point.reference for point in points if point.reference not in points)
        spool_points = [point for point in (*references, *points) if point.system.is_spool]
        lengths = max((longest_lengths(self._jobs, self._scheduling(point)) for point in spool_points), key=sum)
        async with AsyncExitStack() as stack:
            # Plain decoding leaves the draft idle.
            cell = await stack.enter_async_context(running_cell(self._config, lengths, self._reporter))
            peers = self._peers()
            stack.callback(peers.stop)
            keep_loaded_objects()
            for point in references:
                await self._measure(point, None, cell, peers)
            for repeat, point in self._rounds():
                await self._measure(point, repeat, cell, peers)

    def result(self) -> dict[str, Any]:
        sections = {
            "models": self._config.models,
            "engine": self._config.engine,
            "sampling": self._sampling,
            "measured": self._settings,
        }
        return self._origin | {
            "settings": {name: one.model_dump(mode="json", exclude_defaults=True) for name, one in sections.items()},
            "prompts": len(self._jobs),
            "prompt_tokens": sum(len(job.tokens) for job in self._jobs),
            "cells": summarise(self._measurements),
            "measurements": [measurement.to_json() for measurement in self._measurements],
        }

    def _rounds(self) -> Iterator[tuple[int, GridPoint]]:
        """Every other repeat runs backwards, so that neither of two neighbours is always the later one."""
        for repeat in range(self._settings.repeats):
            for point in self._points[:: -1 if repeat % 2 else 1]:
                yield repeat, point

    def _peers(self) -> Peers:
        models = self._config.models
        draft = fetch(models.draft_name, Role.DRAFT, self._reporter) if models.drafts_with_model else ""
        return Peers(
            PeerModels(
                target=str(self._models.target_folder),
                draft=str(draft),
                dtype=self._settings.peer_dtype or models.dtype,
                device=worker_devices(models.device, [1])[0],
                threads=self._config.threads(Role.TARGET),
                max_rows=max(self._settings.batch_size),
                stop_token_ids=sorted(self._models.tokenizer.stop_token_ids),
                prompts=[job.tokens for job in self._jobs],
                max_tokens=[job.max_tokens for job in self._jobs],
            ),
            self._config.engine.cpu_isa,
            self._settings.vllm_python,
        )

    async def _measure(self, point: GridPoint, repeat: int | None, cell: Cell, peers: Peers) -> None:
        """Without `repeat` only for the output, with which the output of other cells is compared."""
        if point.system.is_spool:
            outputs, found = await self._measure_spool(point, cell)
        else:
            outputs, seconds = await asyncio.to_thread(peers.measure, point)
            found = Measurement(point, 0, sum(map(len, outputs)), seconds, 0.0, [])
        if point == point.reference:
            self._expected.setdefault(point, outputs)
        if repeat is None:
            return
        expected = self._expected[point.reference]
        different = [number for number, output in enumerate(outputs) if output != expected[number]]
        match = 1 - len(different) / len(outputs)
        self._measurements.append(replace(found, repeat=repeat, exact_match=match, different=different))
        self._settings.output.write_text(json.dumps(self.result(), indent=2) + "\n", encoding="utf-8")
        self._say(f"{point}, repeat {repeat + 1}: {found.tokens_per_second:.1f} tokens/s, same output {match:.1%}")

    async def _measure_spool(self, point: GridPoint, cell: Cell) -> tuple[list[list[int]], Measurement]:
        completions = [Completion() for _ in self._jobs]
        # The scheduler warms up too: it learns what steps cost, what is accepted and how long outputs are.
        warm_up = [
            replace(job, max_tokens=min(job.max_tokens, _WARM_UP_TOKENS)) for job in self._jobs[: 2 * point.batch_size]
        ]
        plan = DecodingPlan(
            title=str(point),
            config=self._scheduling(point),
            stop_token_ids=self._models.tokenizer.stop_token_ids,
            drafting=point.system.drafts,
            warm_up=warm_up,
        )
        found = await decode(cell, plan, self._jobs, self._reporter, completions.__setitem__)
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
        )
        return [completion.tokens for completion in completions], measurement

    def _scheduling(self, point: GridPoint) -> SchedulerConfig:
        """Plain decoding is the same engine without drafts, in the batches that `auto` forms."""
        drafts = point.system.drafts
        batches = self._settings.max_running_batches
        sizes: dict[str, Any] = {"batch_size": point.batch_size, "draft_length": point.draft_length}
        sizes["max_running"] = None if batches is None else batches * point.batch_size
        scheduling = self._config.scheduling.model_copy(update=sizes)
        config = scheduling.scheduler_config(drafts, policy=Policy(point.system.value) if drafts else Policy.AUTO)
        # The reference decodes one sequence at a time.
        return replace(config, max_running=1) if point == point.reference else config

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
