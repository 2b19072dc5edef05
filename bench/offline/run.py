"""`spool bench offline`: the speed of decoding a list of prompts, cell by cell of a grid, beside plain decoding."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from rich.console import Console, RenderableType

from bench.offline.grid import Grid, GridPoint, System
from bench.offline.inputs import bench_prompts
from bench.offline.options import BenchOfflineSettings, Exactness, without_place
from bench.offline.results_file import BenchFile, output_digest, shown_command
from bench.offline.rounds import NO_CATEGORY, RoundLog
from bench.offline.summary import Measurement
from bench.offline.tables import category_table, cells_table
from bench.offline.workers import BenchWorkers, running_workers
from bench.peers.processes import PeerError, PeerModels, Peers
from bench.record import RESULTS, commit_of, describe_machine
from deploy.errors import UsageError
from deploy.event_loop import run_until_interrupted
from deploy.models import ReadyModels, fetch, prepare_models
from deploy.offline.decoding import Completion, DecodingPlan, Job, decode, longest_lengths, make_jobs
from deploy.offline.devices import worker_devices
from deploy.progress import Reporter, error_console, reporting
from engine.cpu.isa import chosen_isa
from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role
from services.launch.process_tuning import keep_loaded_objects
from services.scheduler.telemetry.statistics import StatisticsSnapshot
from services.scheduler.telemetry.step_trace import StepTrace, chrome_trace, hidden_draft_share

_WARM_UP_TOKENS = 64
_WIDE = 180


def bench_offline(settings: BenchOfflineSettings) -> int:
    """Exit code 0. Raises `UsageError` and `RunError`; what was measured until then is kept."""
    prompts = bench_prompts(settings.inputs)
    console = error_console()
    with reporting(console) as reporter:
        models = _prepare(settings, reporter)
        jobs = make_jobs(prompts, models.tokenizer, settings.sampling, models.max_positions)
        points = bench_points(settings, jobs)
        described = _comparable(settings, models, jobs)
        file = BenchFile(settings.output, described, describe_machine(), shown_command(sys.argv[1:]))
        run_until_interrupted(_Run(settings, models, jobs, points, file, reporter, console).run())
    content = file.to_json()
    # What is no terminal has no width that tables would have to keep to.
    wide = console if console.is_terminal else Console(file=sys.stderr, width=_WIDE)
    wide.print(cells_table(content["cells"]))
    if any(cell["categories"].keys() - {NO_CATEGORY} for cell in content["cells"]):
        wide.print(category_table(content["cells"]))
    if len(content["commits"]) > 1:
        console.print("measured at more than one commit", style="bold red")
    console.print(f"everything is in {settings.output}", highlight=False, markup=False)
    if settings.json_output:
        shown = {name: content[name] for name in ("settings", "left_out", "cells")}
        print(json.dumps({"command": "bench offline"} | shown), flush=True)
    return 0


def bench_points(settings: BenchOfflineSettings, jobs: Sequence[Job]) -> list[GridPoint]:
    """The cells that the settings ask for."""
    categories: list[str | None] = [None]
    if settings.grid.by_category:
        categories += sorted({job.prompt.category for job in jobs if job.prompt.category is not None})
    chosen = {name: settings.model_settings(draft) for name, draft in settings.drafts.items()}
    return Grid(
        systems=list(dict.fromkeys([*settings.grid.policy, *(System(peer.value) for peer in settings.peer)])),
        batch_sizes=list(dict.fromkeys(settings.grid.batch_size)),
        drafts=list(chosen),
        # Others have a draft model or prompt lookup, not both.
        model_drafts=[
            name for name, models in chosen.items() if models.drafts_with_model and models.lookup_match is None
        ],
        draft_lengths=list(dict.fromkeys(settings.grid.draft_length)),
        exact=[exact is Exactness.ON for exact in dict.fromkeys(settings.models.exact)],
        categories=categories,
    ).points()


def scheduler_config(settings: BenchOfflineSettings, point: GridPoint) -> SchedulerConfig:
    """For a cell of ours. Plain decoding is the same engine with nothing drafted, in the groups that `auto` forms."""
    scheduling = settings.grid.scheduling(point.batch_size, point.draft_length)
    if not point.system.drafts:
        return scheduling.config(Policy.AUTO, drafting=False)
    return replace(scheduling.config(Policy(point.system.value), drafting=True), draft_ahead=settings.grid.draft_ahead)


class _Run:
    """One run of the command: measures what the file does not hold yet."""

    def __init__(
        self,
        settings: BenchOfflineSettings,
        models: ReadyModels,
        jobs: list[Job],
        points: list[GridPoint],
        file: BenchFile,
        reporter: Reporter,
        console: Console,
    ) -> None:
        self._settings = settings
        self._models = models
        self._jobs = jobs
        self._file = file
        self._reporter = _Passing(reporter)
        self._console = console
        self._left_out: set[GridPoint] = set()
        self._commit = commit_of(RESULTS.parent)
        missing = {point: None for point in points if any(file.find(point, n) is None for n in self._repeats)}
        # What others are compared with comes first; what only serves for that is measured no further.
        references = dict.fromkeys(point.reference for point in missing)
        self._only_references = [point for point in references if point not in missing and point not in file.references]
        self._pending = sorted(missing, key=lambda point: point not in references)

    @property
    def _repeats(self) -> range:
        return range(self._settings.grid.repeats)

    async def run(self) -> None:
        needed = [*self._only_references, *self._pending]
        ours = [point for point in needed if point.system.is_spool]
        if not needed:
            return
        lengths = max((longest_lengths(self._jobs, scheduler_config(self._settings, p)) for p in ours), key=sum)
        async with AsyncExitStack() as stack:
            workers = await stack.enter_async_context(running_workers(self._settings, ours, lengths, self._reporter))
            peers = await stack.enter_async_context(self._peers(needed))
            keep_loaded_objects()
            for point in self._only_references:
                await self._measure(point, None, workers, peers)
            rounds = list(self._rounds())
            for number, (repeat, point) in enumerate(rounds, 1):
                await self._measure(point, repeat, workers, peers)
                if (found := self._file.find(point, repeat)) is not None:
                    self._say(f"{number}/{len(rounds)} {found}")

    def _rounds(self) -> Iterator[tuple[int, GridPoint]]:
        """What is left to measure, every other repeat backwards: neither of two neighbours is always the later one."""
        for repeat in self._repeats:
            for point in self._pending[:: -1 if repeat % 2 else 1]:
                if self._file.find(point, repeat) is None:
                    yield repeat, point

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _peers(self, points: Sequence[GridPoint]) -> Peers:
        settings = self._settings
        peers = [point for point in points if not point.system.is_spool and point.system is not System.VLLM_NGRAM]
        drafts = {point.draft for point in peers if point.draft is not None}
        models = PeerModels(
            target=self._models.target_folder,
            drafts={draft: fetch(settings.drafts[draft], Role.DRAFT, self._reporter) for draft in drafts},
            dtype=(settings.models.peer_dtype or settings.models.dtype).value,
            cpu_isa=settings.models.cpu_isa,
            device=worker_devices(settings.models.device, [1])[0],
            threads=settings.plain_threads,
            stop_token_ids=self._models.tokenizer.stop_token_ids,
            jobs=self._jobs,
        )
        return Peers(models, points, settings.vllm_python)

    async def _measure(self, point: GridPoint, repeat: int | None, workers: BenchWorkers, peers: Peers) -> None:
        """Without `repeat` for the outputs alone, as what others are compared with."""
        if point in self._left_out:
            return
        indices = [n for n, job in enumerate(self._jobs) if point.category in (None, job.prompt.category)]
        try:
            if point.system.is_spool:
                measurement, digests = await self._measure_ours(point, indices, workers)
            else:
                measurement, digests = await self._measure_peer(point, indices, peers)
        except PeerError as error:
            self._left_out.add(point)
            self._file.leave_out(point.system.value, str(error))
            self._say(f"{point.label}: left out: {error}")
            return
        if point == point.reference and point not in self._file.references:
            self._file.set_reference(point, digests)
        if repeat is None:
            return
        expected = self._file.references.get(point.reference)
        if expected is None:
            reason = f"{point.reference.label}, which its outputs are compared with, could not be measured"
            self._left_out.add(point)
            self._file.leave_out(point.system.value, reason)
            return
        different = [index for index, digest in zip(indices, digests, strict=True) if expected[index] != digest]
        measurement = replace(
            measurement,
            repeat=repeat,
            exact_match=1 - len(different) / len(indices),
            different=[self._jobs[index].prompt.index for index in different],
        )
        self._file.add(measurement)

    async def _measure_ours(
        self, point: GridPoint, indices: Sequence[int], workers: BenchWorkers
    ) -> tuple[Measurement, list[str]]:
        jobs = [self._jobs[index] for index in indices]
        trace = StepTrace()
        rounds = RoundLog(jobs, time.monotonic)
        completions, statistics = await self._decode(point, jobs, workers, trace, rounds)
        if self._settings.trace is not None:
            _write_trace(self._settings.trace, trace)
        measurement = Measurement(
            point=point,
            repeat=0,
            tokens=statistics.tokens,
            seconds=statistics.seconds,
            exact_match=0.0,
            different=[],
            commit=self._commit,
            statistics=statistics.to_json(),
            hidden_draft_share=hidden_draft_share(trace.steps),
            categories={name: category.to_json() for name, category in rounds.by_category().items()},
        )
        return measurement, [output_digest(completion.tokens) for completion in completions]

    async def _decode(
        self,
        point: GridPoint,
        jobs: Sequence[Job],
        workers: BenchWorkers,
        trace: StepTrace,
        rounds: RoundLog,
    ) -> tuple[list[Completion], StatisticsSnapshot]:
        config = scheduler_config(self._settings, point)
        if point == point.reference:
            # One sequence at a time, and nothing beside it.
            config = replace(config, max_running=1)
        completions = [Completion() for _ in jobs]
        plan = DecodingPlan(
            title=point.label,
            config=config,
            stop_token_ids=self._models.tokenizer.stop_token_ids,
            drafting=point.system.drafts,
            # The scheduler too has to warm up: it measures how long steps take, what is accepted, how long outputs are.
            warm_up=[
                replace(job, max_tokens=min(job.max_tokens, _WARM_UP_TOKENS)) for job in jobs[: 2 * point.batch_size]
            ],
            trace=trace,
            on_delta=rounds.add,
        )
        workers.check_alive()
        statistics = await decode(workers.cell(point), plan, jobs, self._reporter, completions.__setitem__)
        workers.check_alive()
        return completions, statistics

    async def _measure_peer(
        self, point: GridPoint, indices: Sequence[int], peers: Peers
    ) -> tuple[Measurement, list[str]]:
        outputs, seconds = await peers.measure(point, indices)
        measurement = Measurement(
            point=point,
            repeat=0,
            tokens=sum(map(len, outputs)),
            seconds=seconds,
            exact_match=0.0,
            different=[],
            commit=self._commit,
        )
        return measurement, [output_digest(tokens) for tokens in outputs]


class _Passing:
    """Reports of many runs, one after the other, as one that never ends: each run's end is told elsewhere."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def stage(self, who: str, message: str, fraction: float | None) -> None:
        self._reporter.stage(who, message, fraction)

    def run(self, title: str, done: int, total: int, statistics: StatisticsSnapshot | None) -> None:
        if done < total:
            self._reporter.run("measuring", done, total, statistics)

    def show(self, content: RenderableType) -> None:
        self._reporter.show(content)


def _prepare(settings: BenchOfflineSettings, reporter: Reporter) -> ReadyModels:
    """Every draft is fetched and checked before anything starts."""
    ready = [prepare_models(settings.model_settings(draft), True, reporter) for draft in settings.drafts.values()]
    return ready[0]


def _comparable(settings: BenchOfflineSettings, models: ReadyModels, jobs: Sequence[Job]) -> dict[str, Any]:
    """What measurements in one file must share."""
    chosen = settings.models
    return {
        "target": without_place(chosen.target),
        "vocabulary": models.tokenizer.vocabulary_digest.hex()[:16],
        "dtype": chosen.dtype.value,
        "peer_dtype": (chosen.peer_dtype or chosen.dtype).value,
        "cpu_isa": chosen_isa(chosen.cpu_isa).name,
        "device": chosen.device,
        "threads": chosen.threads,
        "plain_threads": settings.plain_threads,
        "draft_workers": chosen.draft_workers,
        "target_workers": chosen.target_workers,
        "window": settings.grid.max_running,
        "window_batches": settings.grid.max_running_batches,
        # Files from before drafting ahead do not have it.
        **({"draft_ahead": settings.grid.draft_ahead} if settings.grid.draft_ahead else {}),
        "sampling": settings.sampling.model_dump(mode="json"),
        "prompts": len(jobs),
        "prompt_tokens": sum(len(job.tokens) for job in jobs),
        "prompts_digest": output_digest([token for job in jobs for token in (*job.tokens, -1)]),
    }


def _write_trace(path: Any, trace: StepTrace) -> None:
    try:
        path.write_text(json.dumps(chrome_trace(trace.steps)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
