"""Loads the engines and measures the grid, one variant of the target after the other."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.gpu.device import copy_bytes_per_second, weight_bytes_per_pass
from bench.gpu.driver import InProcessCell, RunRecord
from bench.gpu.figures import CellFigures, StreamingLimit, compare_logits, summarise
from bench.gpu.results import ResultFile
from bench.gpu.settings import REFERENCE, GpuBenchSettings, Point, grid, variant_name
from bench.offline.grid import System
from engine.errors import EngineError
from engine.models.loading import load_draft_engine, load_target_engine
from engine.models.source import Progress
from scheduler.messages import SequenceRequest
from services.worker.executor import DraftStepExecutor, TargetStepExecutor

_WARM_UP_TOKENS = 16
"""Enough for the policy `auto` to have tried its draft lengths and made a plan."""


def measure(settings: GpuBenchSettings, pair: Path, results: ResultFile, progress: Progress) -> None:
    """Writes every cell as soon as it is measured. A variant whose engine cannot be loaded is left out, with the
    reason; whatever else goes wrong is raised.
    """
    # Before the engines take their memory, so that the copies are large.
    _free_memory(settings.device)
    bandwidth = copy_bytes_per_second(settings.device)
    _free_memory(settings.device)
    limit = StreamingLimit(weight_bytes_per_pass(pair / "target", settings.dtype), bandwidth)
    results.set("streaming_limit", limit.to_json())
    progress(
        f"copies at {bandwidth / 1e9:.0f} GB/s, so {limit.step_seconds * 1000:.2f} ms to read the target's weights",
        None,
    )
    # Cells decode the same prompts: nothing is to be left of the one before.
    engine = load_draft_engine(settings.engine(str(pair / "draft"), exact=False), progress)
    draft = DraftStepExecutor(engine, prefix_cache=False)
    for variant in settings.target_variants:
        try:
            target = _load_target(settings, pair, variant, results, progress)
        except EngineError as error:
            results.leave_out(variant_name(variant), str(error))
            progress(f"{variant_name(variant)}: left out, {error}", None)
            continue
        bench = VariantBench(settings, target, draft)
        _measure_variant(bench, settings, variant, limit, results, progress)
        del bench, target
        _free_memory(settings.device)
    results.set("complete", results.whole)


def _free_memory(device: str) -> None:
    """Gives back what nothing refers to any more: the next engine's weights may need it."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def _load_target(
    settings: GpuBenchSettings, pair: Path, variant: Mapping[str, Any], results: ResultFile, progress: Progress
) -> TargetStepExecutor:
    started = time.perf_counter()
    engine = load_target_engine(settings.engine(str(pair / "target"), **variant), progress)
    found = {
        "engine": dict(variant),
        "load_seconds": time.perf_counter() - started,
        "max_num_batched_tokens": engine.description.max_num_batched_tokens,
        "exact_row_counts": list(engine.description.exact_row_counts),
        "kv_bytes_per_token": engine.description.kv_bytes_per_token,
    }
    results.append("targets", found)
    return TargetStepExecutor(engine, prefix_cache=False)


def _measure_variant(
    bench: VariantBench,
    settings: GpuBenchSettings,
    variant: Mapping[str, Any],
    limit: StreamingLimit,
    results: ResultFile,
    progress: Progress,
) -> None:
    name = variant_name(variant)
    for point, figures in bench.cells(limit):
        results.append("cells", {"engine": dict(variant), **_point_json(settings, point), **asdict(figures)})
        progress(f"{name}, {point}: {_told(figures)}", None)
    found = bench.logits()
    results.append("logits", {"engine": dict(variant), **found})
    progress(
        f"{name}, logits: {found['equal_logits']} of {found['compared_logits']} bit-equal, batch 1 plain and "
        f"speculation at batch {found['batch_size']}",
        None,
    )


class VariantBench:
    """One loaded target, and the draft. Schedulers come and go; the workers stay."""

    _scheduler_epochs = itertools.count(1)

    def __init__(self, settings: GpuBenchSettings, target: TargetStepExecutor, draft: DraftStepExecutor) -> None:
        self._settings = settings
        self._target = target
        self._draft = draft

    def cells(self, limit: StreamingLimit) -> Iterator[tuple[Point, CellFigures]]:
        """The grid; outputs are compared with those of batch-1 plain decoding on the same target."""
        settings = self._settings
        reference: dict[int, list[int]] | None = None
        if 1 not in settings.batch_sizes:
            reference = self._reference(self._run(REFERENCE, settings.compared, settings.max_tokens))
        for point in grid(settings):
            run = self._run(point, settings.sequences(point.batch_size), settings.max_tokens)
            if reference is None:
                reference = self._reference(run)
            yield point, summarise(run, reference, limit)

    def logits(self) -> dict[str, Any]:
        """The bits of the logits: batch 1 plain, and speculation of fixed length in a large batch."""
        settings = self._settings
        speculative = Point(System.RAGGED, settings.logits_batch_size)
        sequences = settings.sequences(settings.logits_batch_size)
        plain = self._run(REFERENCE, settings.compared, settings.logits_tokens, logits_digests=True)
        other = self._run(speculative, sequences, settings.logits_tokens, logits_digests=True)
        comparison = compare_logits(plain.outputs, other.outputs)
        return {**_point_json(settings, speculative), "tokens": settings.logits_tokens, **asdict(comparison)}

    def _reference(self, run: RunRecord) -> dict[int, list[int]]:
        return {number: run.outputs[number].tokens for number in range(self._settings.compared)}

    def _run(self, point: Point, sequences: int, max_tokens: int, logits_digests: bool = False) -> RunRecord:
        """A scheduler of its own, warmed up with other prompts; nothing of that is in the record."""
        settings = self._settings
        workers = {"target": self._target} | ({"draft": self._draft} if point.system.drafts else {})
        cell = InProcessCell(point.scheduling(settings), workers, next(self._scheduler_epochs))

        def requests(first: int, count: int, tokens: int) -> list[SequenceRequest]:
            return [
                SequenceRequest(
                    number, prompt(settings, self._vocabulary, number), tokens, logits_digests=logits_digests
                )
                for number in range(first, first + count)
            ]

        cell.run(requests(sequences, point.batch_size, min(_WARM_UP_TOKENS, max_tokens)))
        return cell.run(requests(0, sequences, max_tokens))

    @property
    def _vocabulary(self) -> int:
        return self._target.describe().vocabulary_size


def prompt(settings: GpuBenchSettings, vocabulary: int, number: int) -> tuple[int, ...]:
    """Random tokens, the same for a number whatever else is decoded."""
    rng = random.Random(f"{settings.seed} {number}")
    return tuple(rng.randrange(vocabulary) for _ in range(settings.prompt_tokens))


def _point_json(settings: GpuBenchSettings, point: Point) -> dict[str, Any]:
    config = point.scheduling(settings)
    return {
        "system": point.system.value,
        "batch_size": config.batch_size,
        "window": config.max_running,
        "draft_length": config.draft_length,
    }


def _told(figures: CellFigures) -> str:
    speed = f"{figures.tokens_per_second:.1f} tokens/s"
    if figures.target_step_seconds is not None:
        speed += f", {figures.target_step_seconds * 1000:.2f} ms a target step"
    if figures.streaming_share is not None:
        speed += f", {figures.streaming_share:.0%} of the streaming limit"
    if figures.committed_per_round is not None:
        speed += f", {figures.committed_per_round:.2f} tokens a round"
    return f"{speed}, {figures.equal_outputs} of {figures.compared_outputs} outputs equal"
