"""What a sequence's way to another target takes, with its KV and without. JSON on the last line.

    python -m bench.kv_movement --target demo --lengths 64 256 1024

Two target workers run in processes of their own, a core each, and nothing else is asked of them. A sequence is computed
on the first one in chunks, as a prefill is; then the second one fetches its KV over gRPC. `recompute_seconds` is what
the first took, `move_seconds` what the second did, both as the scheduler sees them; medians over `--repeats`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc.aio

from protos import worker_pb2, worker_pb2_grpc
from scheduler.messages import Role
from scheduler.state.digests import DigestedTokens
from services.launch.launcher import WorkerLaunch, WorkerLauncher
from services.rpc.protocol_version import PROTOCOL_VERSION

_SCHEDULER_EPOCH = 1
_VOCABULARY = 1000


@dataclass
class Worker:
    """One worker and the stream of its steps."""

    address: str
    stub: worker_pb2_grpc.WorkerStub
    description: worker_pb2.WorkerDescription
    requests: asyncio.Queue[worker_pb2.StepRequest]
    replies: AsyncIterator[worker_pb2.StepReply]
    step_id: int = 0

    async def step(self, rows: Sequence[worker_pb2.Row] = (), released: Sequence[int] = ()) -> worker_pb2.StepReply:
        """Raises RuntimeError where a row did not go well."""
        self.requests.put_nowait(
            worker_pb2.StepRequest(
                worker_epoch=self.description.worker_epoch,
                scheduler_epoch=_SCHEDULER_EPOCH,
                step_id=self.step_id,
                rows=rows,
                released_sequence_ids=released,
            )
        )
        self.step_id += 1
        reply = await anext(self.replies)
        wrong = [row for row in reply.rows if row.status != worker_pb2.ROW_STATUS_OK]
        if reply.status != worker_pb2.STEP_STATUS_OK or wrong:
            raise RuntimeError(f"step {reply.step_id} failed: {reply.error or wrong}")
        return reply


async def connect(address: str, channel: grpc.aio.Channel) -> Worker:
    stub = worker_pb2_grpc.WorkerStub(channel)
    requests: asyncio.Queue[worker_pb2.StepRequest] = asyncio.Queue()

    async def sent() -> AsyncIterator[worker_pb2.StepRequest]:
        while True:
            yield await requests.get()

    description = await stub.Describe(worker_pb2.DescribeRequest(protocol_version=PROTOCOL_VERSION))
    worker = Worker(address, stub, description, requests, aiter(stub.Steps(sent())))
    await worker.step()
    return worker


async def compute(worker: Worker, sequence_id: int, tokens: Sequence[int], chunk: int) -> None:
    known = DigestedTokens(tokens)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        parameters = worker_pb2.SequenceParameters(prompt_length=len(tokens)) if not start else None
        row = worker_pb2.Row(
            sequence_id=sequence_id,
            kv_len=start,
            prefix_digest=known.digest(start),
            tokens=part,
            sample=start + chunk >= len(tokens),
            parameters=parameters,
        )
        await worker.step([row])


async def move(source: Worker, destination: Worker, sequence_id: int, tokens: Sequence[int]) -> int:
    """Returns the bytes moved."""
    request = worker_pb2.ImportKvRequest(
        worker_epoch=destination.description.worker_epoch,
        scheduler_epoch=_SCHEDULER_EPOCH,
        sequence_id=sequence_id,
        tokens=tokens,
        parameters=worker_pb2.SequenceParameters(prompt_length=len(tokens)),
        source_address=source.address,
        source_worker_epoch=source.description.worker_epoch,
        source_scheduler_epoch=_SCHEDULER_EPOCH,
    )
    reply: worker_pb2.ImportKvReply = await destination.stub.ImportKv(request)
    return reply.bytes


async def measure(settings: argparse.Namespace) -> dict[str, object]:
    cpus = sorted(os.sched_getaffinity(0))
    launches = [
        WorkerLaunch(
            Role.TARGET,
            {"model": settings.target, "dtype": settings.dtype, "threads": 1, "prefix_cache": False},
            threads=1,
            cpus=(cpus[index % len(cpus)],),
        )
        for index in range(2)
    ]
    rng = random.Random(1)
    async with WorkerLauncher(launches, on_loading=lambda message: print(message.message, file=sys.stderr)) as launcher:
        addresses = [worker.address for worker in launcher.workers]
        async with grpc.aio.insecure_channel(addresses[0]) as first, grpc.aio.insecure_channel(addresses[1]) as second:
            source, destination = await connect(addresses[0], first), await connect(addresses[1], second)
            points = [await _point(source, destination, length, settings, rng) for length in settings.lengths]
    return {
        "target": settings.target,
        "dtype": settings.dtype,
        "prefill_chunk": settings.chunk,
        "kv_bytes_per_token": source.description.kv_bytes_per_token,
        "points": points,
    }


async def _point(
    source: Worker, destination: Worker, length: int, settings: argparse.Namespace, rng: random.Random
) -> dict[str, object]:
    recomputed, moved, size = [], [], 0
    for repeat in range(1 + settings.repeats):
        tokens = [rng.randrange(_VOCABULARY) for _ in range(length)]
        began = time.perf_counter()
        await compute(source, 1, tokens, settings.chunk)
        computed = time.perf_counter()
        size = await move(source, destination, 1, tokens)
        ended = time.perf_counter()
        for worker in (source, destination):
            await worker.step(released=[1])
        if repeat:  # the first makes kernels and connections
            recomputed.append(computed - began)
            moved.append(ended - computed)
    point: dict[str, object] = {
        "positions": length,
        "bytes": size,
        "recompute_seconds": round(statistics.median(recomputed), 5),
        "move_seconds": round(statistics.median(moved), 5),
    }
    print(json.dumps(point), file=sys.stderr)
    return point


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.kv_movement", description="Times moving KV against computing it.")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256, 1024, 2000])
    parser.add_argument("--chunk", type=int, default=64, help="tokens of a prefill step")
    parser.add_argument("--repeats", type=int, default=5)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
