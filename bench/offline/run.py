"""`spool bench offline`: the speed of decoding a list of prompts, by Spool and by other systems, cell by cell."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from rich.console import Console

from bench.offline.grid import GridPoint
from bench.offline.options import BenchOfflineSettings
from bench.offline.peers import PeerModels, Peers
from bench.offline.results import Measurement, cells_table, summarise
from bench.record import origin
from deploy.errors import RunError
from deploy.event_loop import run_until_interrupted
from deploy.models import ReadyModels, fetch, prepare_models
from deploy.offline.cell import Cell, running_cell
from deploy.offline.decoding import Completion, DecodingPlan, Job, decode, longest_lengths, make_jobs
from deploy.offline.prompts import Prompt, load_prompts
from deploy.progress import Reporter
from deploy.workers import worker_devices
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role
from services.launch.process_tuning import keep_loaded_objects

_WARM_UP_TOKENS = 64
_WIDTH = 180


def bench_offline(settings: BenchOfflineSettings) -> int:
    """Exit code 0. Raises `UsageError` and `RunError`; the file has whatever was measured before."""
    prompts = bench_prompts(settings)
    console = Console(file=sys.stderr)
    with Reporter() as reporter:
        # Every draft is fetched and compared with the target before anything starts.
        for point in {point.draft: point for point in settings.points}.values():
            models = prepare_models(settings.run_settings(point).models, point.draft is not None, reporter)
        jobs = make_jobs(prompts, models.tokenizer, settings.sampling, models.max_positions)
        run = _Run(settings, models, jobs, reporter, console)
        run_until_interrupted(run.run())
    result = run.result()
    # Tables are not cut to the width of a terminal where there is none.
    wide = console if console.is_terminal else Console(file=sys.stderr, width=_WIDTH)
    wide.print(cells_table(result["cells"]))
    console.print(f"the result is in {settings.output}", highlight=False, markup=False)
    return 0


def bench_prompts(settings: BenchOfflineSettings) -> list[Prompt]:
    """All prompts, or `count` of them, evenly spaced. Raises `UsageError`."""
    prompts = load_prompts(settings.prompts, None)
    if settings.count is None:
        return prompts
    return prompts[:: max(1, len(prompts) // settings.count)][: settings.count]


class _Run:
    """Measures every cell `repeats` times."""

    def __init__(
        self, settings: BenchOfflineSettings, models: ReadyModels, jobs: list[Job], reporter: Reporter, console: Console
    ) -> None:
        self._settings = settings
        self._models = models
        self._jobs = jobs
        self._reporter = reporter
        self._console = console
        self._origin = origin(shlex.join(["spool", *sys.argv[1:]]))
        self._measurements: list[Measurement] = []
        self._expected: dict[GridPoint, list[list[int]]] = {}

    async def run(self) -> None:
        points = self._settings.points
        references = dict.fromkeys(point.reference for point in points if point.reference not in points)
        spool_points = [point for point in (*references, *points) if point.system.is_spool]
        lengths = max((longest_lengths(self._jobs, self._config(point)) for point in spool_points), key=sum)
        drafting = {point.draft: point for point in spool_points if point.draft is not None}
        async with AsyncExitStack() as stack:
            cells = {}
            for point in drafting.values() or [spool_points[0]]:
                running = running_cell(self._settings.run_settings(point), lengths, self._reporter)
                cells[point.draft] = await stack.enter_async_context(running)
            # Plain decoding leaves the draft of the first cell idle.
            cells[None] = next(iter(cells.values()))
            peers = self._peers([*references, *points])
            stack.callback(peers.stop)
            keep_loaded_objects()
            for point in references:
                await self._measure(point, None, cells, peers)
            for repeat, point in self._rounds():
                await self._measure(point, repeat, cells, peers)

    def result(self) -> dict[str, Any]:
        settings = self._settings.model_dump(mode="json", exclude={"output", "vllm_python"})
        return self._origin | {
            "settings": settings,
            "prompts": len(self._jobs),
            "prompt_tokens": sum(len(job.tokens) for job in self._jobs),
            "cells": summarise(self._measurements),
            "measurements": [measurement.to_json() for measurement in self._measurements],
        }

    def _rounds(self) -> Iterator[tuple[int, GridPoint]]:
        """Every other repeat runs backwards, so that neither of two neighbours is always the later one."""
        for repeat in range(self._settings.repeats):
            for point in self._settings.points[:: -1 if repeat % 2 else 1]:
                yield repeat, point

    def _peers(self, points: Sequence[GridPoint]) -> Peers:
        settings = self._settings
        drafts = {point.draft for point in points if not point.system.is_spool and point.draft is not None} - {"ngram"}
        models = PeerModels(
            target=str(self._models.target_folder),
            drafts={draft: str(fetch(draft, Role.DRAFT, self._reporter)) for draft in drafts},
            dtype=(settings.peer_dtype or settings.dtype).value,
            device=worker_devices(settings.device, [1])[0],
            threads=settings.threads_per_process,
            max_rows=max(settings.batch_size),
            stop_token_ids=sorted(self._models.tokenizer.stop_token_ids),
            prompts=[job.tokens for job in self._jobs],
            max_tokens=[job.max_tokens for job in self._jobs],
        )
        return Peers(models, settings.cpu_isa, settings.vllm_python)

    async def _measure(
        self, point: GridPoint, repeat: int | None, cells: Mapping[str | None, Cell], peers: Peers
    ) -> None:
        """Without `repeat` only for the output, with which the output of other cells is compared."""
        if point.system.is_spool:
            outputs, found = await self._measure_spool(point, cells[point.draft])
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
            config=self._config(point),
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

    def _config(self, point: GridPoint) -> SchedulerConfig:
        """Plain decoding is the same engine without drafts, in the batches that `auto` forms."""
        policy = Policy(point.system.value) if point.system.drafts else Policy.AUTO
        config = self._settings.run_settings(point).scheduling.config(policy, point.system.drafts)
        # The reference decodes one sequence at a time.
        return replace(config, max_running=1) if point == point.reference else config

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
