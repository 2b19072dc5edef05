"""Where the milliseconds of a step go: operations of the pass, what surrounds it, and the wire. JSON on the last line.

    python -m bench.step_parts --target demo --threads 2

Sequences of several lengths stand on the target, as in a batch that is served. Times of torch's operations are those
of its profiler (which itself costs some), those of Spool's kernels are taken around their calls; `dispatch` is what is
left of a pass: Python and torch between the operations. `wire` is what a step takes from the scheduler's side beyond
its own time on a worker, measured with prompt lookup in a worker process of its own, which hardly computes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc
import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.device import copy_bandwidth
from engine.cpu.fused_layers import KernelDecoder
from engine.kv.pages import PageTable
from engine.models.loading import load_target_engine
from engine.settings import EngineSettings
from engine.steps import EngineTimings, VerifyRow
from engine.target import TargetEngine
from protos import worker_pb2, worker_pb2_grpc
from scheduler.messages import Role, Row, SendStep, SequenceRequest
from scheduler.sampling import SamplingParameters
from scheduler.state.digests import DigestedTokens
from services.launch.launcher import WorkerLaunch, WorkerLauncher
from services.rpc.protocol_version import PROTOCOL_VERSION
from services.rpc.worker_codec import step_to_wire

_LENGTHS = (60, 100, 150, 200, 250, 300, 350, 400)
SHAPES = ((1, 1), (1, 5), (8, 1), (8, 3), (8, 5), (16, 1))
_PASSES = 15
_WIRE_STEPS = 300
_PARTS = {
    "linear layers": ("mkldnn::_linear_pointwise", "aten::addmm", "aten::linear", "aten::mm"),
    "attention": ("aten::index_select", "aten::baddbmm", "aten::bmm", "aten::_softmax"),
    "writing KV": ("aten::index_copy_",),
}
_KERNELS = {
    "linear": "linear layers",
    "attend": "attention",
    "rotate_write": "writing KV",
    "norm": "other operations",
    "add_norm": "other operations",
    "silu_mul": "other operations",
}


def median_ms(action: Callable[[], object]) -> float:
    samples = []
    for _ in range(_PASSES):
        started = time.perf_counter()
        action()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples) * 1000


def by_parts(decoder: KernelDecoder) -> Callable[..., None]:
    """`decoder.add_layers` in one call for each part of each layer."""

    def add_layers(hidden_states: torch.Tensor, *position_and_step: Any) -> None:
        for layer in decoder.layers:
            layer(hidden_states, *position_and_step)

    return add_layers


class KernelClock:
    """Milliseconds that an engine spends in Spool's kernels, by part, while this context is open: layers that are one
    call otherwise make one for each part."""

    def __init__(self, engine: TargetEngine) -> None:
        modules = list(engine._runner.model.modules())
        kernels = (getattr(module, "_kernels", None) for module in modules)
        self._kernels = next((found for found in kernels if found is not None), None)
        self._decoders = [module for module in modules if isinstance(module, KernelDecoder)]
        self.spent = dict.fromkeys(_KERNELS.values(), 0.0)

    def __enter__(self) -> KernelClock:
        if self._kernels is not None:
            for name, part in _KERNELS.items():
                setattr(self._kernels, name, self._timed(getattr(self._kernels, name), part))
        for decoder in self._decoders:
            decoder.add_layers = by_parts(decoder)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        if self._kernels is not None:
            for name in _KERNELS:
                delattr(self._kernels, name)
        for decoder in self._decoders:
            del decoder.add_layers

    def _timed(self, kernel: Callable[..., object], part: str) -> Callable[..., object]:
        def timed(*arguments: object) -> object:
            started = time.perf_counter()
            result = kernel(*arguments)
            self.spent[part] += (time.perf_counter() - started) * 1000
            return result

        return timed


class Batch:
    """Sequences of several lengths, verified again and again at the same place."""

    def __init__(self, engine: TargetEngine, sequences: int, rows: int) -> None:
        self._engine = engine
        self._tables: list[tuple[PageTable, list[int]]] = []
        self._rows = rows
        rng = random.Random(sequences)
        for index in range(sequences):
            tokens = [rng.randrange(engine.description.vocabulary_size) for _ in range(_LENGTHS[index % len(_LENGTHS)])]
            table = PageTable()
            for first in range(0, len(tokens), 64):
                engine.step([self._row(table, tokens[first : first + 64], [], tokens, sample=False)])
            self._tables.append((table, tokens))

    def step(self) -> EngineTimings:
        rows = [
            self._row(table, tokens[-1:], tokens[: self._rows - 1], tokens, sample=True)
            for table, tokens in self._tables
        ]
        timings = self._engine.step(rows).timings
        for table, tokens in self._tables:
            self._engine.pool.truncate(table, len(tokens))
        return timings

    def free(self) -> None:
        for table, _ in self._tables:
            self._engine.pool.free(table)

    @staticmethod
    def _row(table: PageTable, tokens: list[int], draft: list[int], history: list[int], sample: bool) -> VerifyRow:
        return VerifyRow(table, tokens, draft, sample, history, 1, SamplingParameters(temperature=0.0))


def parts_of(engine: TargetEngine, sequences: int, rows: int) -> dict[str, Any]:
    """Milliseconds of a step of so many sequences with so many rows each."""
    batch = Batch(engine, sequences, rows)
    for _ in range(_PASSES):
        batch.step()
    timings = [batch.step() for _ in range(_PASSES)]
    total = median_ms(batch.step)
    forward = statistics.median(timing.forward for timing in timings) * 1000
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        profiled = statistics.median(batch.step().forward for _ in range(_PASSES)) * 1000
    with KernelClock(engine) as clock:
        for _ in range(_PASSES):
            batch.step()
    batch.free()
    operations = {event.key: event.self_cpu_time_total / 1000 / _PASSES for event in recorded.key_averages()}
    found = {name: sum(operations.pop(key, 0.0) for key in keys) for name, keys in _PARTS.items()}
    found["other operations"] = sum(operations.values())
    for part, spent in clock.spent.items():
        found[part] += spent / _PASSES
    # The profiler slows the work between the operations, but hardly the large operations themselves.
    found["dispatch"] = max(0.0, forward - sum(found.values()))
    return {
        "sequences": sequences,
        "rows_each": rows,
        "step": total,
        "forward": forward,
        "forward_profiled": profiled,
        "prepare": statistics.median(timing.prepare for timing in timings) * 1000,
        "sample": statistics.median(timing.sample for timing in timings) * 1000,
        "parts": found,
    }


async def wire_ms(sequences: int, tokens: int) -> dict[str, float]:
    """Milliseconds from encoding a step to its decoded answer, beyond the worker's own time, one step at a time."""
    overheads, encoding = [], []
    size = 0
    async with WorkerLauncher([WorkerLaunch(Role.DRAFT, {"model": "ngram"}, threads=1)]) as launcher:
        channel = grpc.aio.insecure_channel(launcher.workers[0].address)
        stub = worker_pb2_grpc.WorkerStub(channel)
        description = await stub.Describe(worker_pb2.DescribeRequest(protocol_version=PROTOCOL_VERSION))
        stream = stub.Steps()
        for step in wire_steps(sequences, tokens):
            started = time.perf_counter()
            request = step_to_wire(step, description.worker_epoch, 1)
            encoding.append(time.perf_counter() - started)
            await stream.write(request)
            reply = await stream.read()
            overheads.append(time.perf_counter() - started - reply.timings.total)
            size = request.ByteSize()
        await stream.done_writing()
        await channel.close(None)
    return {
        "round_trip": statistics.median(overheads) * 1000,
        "round_trip_p99": sorted(overheads)[int(0.99 * len(overheads))] * 1000,
        "of_it_encoding": statistics.median(encoding) * 1000,
        "request_bytes": float(size),
    }


def wire_steps(sequences: int, tokens: int) -> list[SendStep]:
    """The steps that `wire_ms` sends: a first with whole prompts, then steps that feed `tokens` to each sequence."""
    history = [DigestedTokens(tuple(range(index, index + 200))) for index in range(sequences)]
    steps = []
    for number in range(1, _WIRE_STEPS + 1):
        rows = []
        for index, known in enumerate(history):
            start = 0 if number == 1 else len(known) - tokens
            opening = SequenceRequest(index, tuple(known.tokens), 1000) if number == 1 else None
            fed = tuple(known.tokens[start:])
            rows.append(Row(index, start, known.digest(start), fed, (), 0, False, opening))
            known.extend((number,) * tokens)
        steps.append(SendStep("draft-0", number, tuple(rows)))
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    settings = EngineSettings(arguments.target, dtype=arguments.dtype, threads=arguments.threads, kv_pages=1024)
    engine = load_target_engine(settings, lambda message, _: print(message, file=sys.stderr))
    steps = []
    for sequences, rows in SHAPES:
        steps.append(parts_of(engine, sequences, rows))
        print(f"{sequences} x {rows} rows: {steps[-1]['step']:.1f} ms", file=sys.stderr)
    wire = asyncio.run(wire_ms(8, 2))
    print(
        json.dumps(
            {
                "threads": arguments.threads,
                "steps": steps,
                "wire": wire,
                "copy_gb_per_second": copy_bandwidth("cpu") / 1e9,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
