"""The command line of `python -m bench.gpu profile`: where the time of a target's steps goes, by torch's profiler."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers.utils import logging as transformers_logging

from bench.gpu.device import check_device, default_device, describe_used
from bench.gpu.pair import PairError, ensure_pair
from bench.gpu.results import write_json
from bench.gpu.settings import GpuBenchSettings
from bench.record import origin
from engine.errors import EngineError
from engine.kv.pages import PageTable
from engine.models.loading import load_target_engine
from engine.settings import DTYPES
from engine.steps import VerifyRow
from engine.target import TargetEngine
from scheduler.sampling import SamplingParameters

_DESCRIPTION = "Steps of the target of a pair at one place: time by operation, and operations a step."
_PROMPT_TOKENS = 64
_WARM_UP, _STEPS = 5, 10
_SHOWN = 20


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu profile", description=_DESCRIPTION)
    parser.add_argument("folder", type=Path, help="of the pair; made where it is not there")
    parser.add_argument("--shape", required=True, help="as of `measure`")
    parser.add_argument("--agreement", type=float, default=0.7, help="as of `measure`")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda where there is one")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and KV")
    parser.add_argument("--batch-size", type=int, default=8, help="rows")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file")
    asked = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    started = time.monotonic()

    def progress(message: str, _fraction: float | None) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {message}", file=sys.stderr, flush=True)

    try:
        device = asked.device or default_device()
        check_device(device)
        settings = GpuBenchSettings(asked.shape, asked.agreement, (asked.batch_size,), device, asked.dtype)
        ensure_pair(asked.folder, settings, progress)
        engine = load_target_engine(settings.engine(str(asked.folder / "target"), exact=True), progress)
    except (ValueError, EngineError, PairError) as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 1
    shapes = []
    for rows in (1, settings.draft_length + 1):
        shapes.append(profiled(engine, asked.batch_size, rows))
        for line in _lines(shapes[-1]):
            print(line, file=sys.stderr, flush=True)
    command = f"python -m bench.gpu profile FOLDER --shape {asked.shape} --batch-size {asked.batch_size}"
    write_json(asked.output, origin(command, describe_used(device)) | {"shapes": shapes})
    print(asked.output)
    return 0


def profiled(engine: TargetEngine, sequences: int, rows: int) -> dict[str, Any]:
    """Of steps that verify `rows` rows of each of so many sequences: median milliseconds without the profiler, and with
    it each operation's share of the device's time and how often a step calls it."""
    device = torch.device(engine.description.device)
    prompt = [1 + place % 7 for place in range(_PROMPT_TOKENS)]
    tables = [PageTable() for _ in range(sequences)]
    greedy = SamplingParameters()

    def step() -> float:
        fed = [prompt if not table.length else prompt[-1:] for table in tables]
        batch = [
            VerifyRow(table, tokens, [3] * (rows - 1), True, prompt, len(prompt), greedy)
            for table, tokens in zip(tables, fed, strict=True)
        ]
        started = time.perf_counter()
        engine.step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = time.perf_counter() - started
        for table in tables:
            engine.pool.truncate(table, len(prompt) - 1)
        return elapsed

    for _ in range(_WARM_UP):
        step()
    seconds = statistics.median(step() for _ in range(_STEPS))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as found:
        for _ in range(_STEPS):
            step()
    for table in tables:
        engine.pool.free(table)
    spent = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    operations = [(event.key, getattr(event, spent), event.count) for event in found.key_averages()]
    total = sum(time for _, time, _ in operations) or 1.0
    operations.sort(key=lambda operation: -operation[1])
    return {
        "sequences": sequences,
        "rows_each": rows,
        "step_ms": seconds * 1000,
        "profiled_ms": total / 1000 / _STEPS,
        "operations": [
            {"name": name[:120], "share": time / total, "calls_per_step": count / _STEPS}
            for name, time, count in operations[:_SHOWN]
        ],
    }


def _lines(shape: dict[str, Any]) -> list[str]:
    first = f"{shape['sequences']} sequences of {shape['rows_each']} rows: {shape['step_ms']:.2f} ms a step"
    return [
        first,
        *(f"  {one['share']:5.1%}  {one['calls_per_step']:6.1f} x  {one['name']}" for one in shape["operations"]),
    ]
