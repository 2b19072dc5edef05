"""How long one key's requests wait for their first token, alone and while another key floods the server.

Conditions like those of a model of 8 billion parameters on GPUs: `--targets` target workers, each in a process of its
own, compute a tiny model, and then sleep until a step has taken `--step` seconds and `--token` more for each token in
it (bench/pacing). Nothing is drafted: first tokens do not need it. All prompts have `--prompt` tokens, and differ from
their beginning on; the scheduler has its default settings. A scheduler and an HTTP gateway run here, the clients of
each key in a process of their own.

The key `single` asks once a second, first alone, then while the key `flood` keeps `--streams` streams open. Both weigh
the same. A request that comes while a step runs waits for the end of that step, and of the one queued behind it,
whatever the scheduler does. So a request of a single step takes up to three times as long beside a flood as alone, one
of seven chunks, as here, up to 9/7.

    python -m bench.fairness --json bench/results/fairness.json
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.pacing import Pace, paced
from bench.record import write_result
from bench.serving.load import percentile
from bench.synthetic_pair import SHAPES, save_tokenizer, write_model
from scheduler.config import SchedulerConfig
from scheduler.key_class import KeyClass
from scheduler.messages import Role
from services.gateway.http.app import create_app
from services.gateway.http.server import HttpServer
from services.gateway.settings import GatewaySettings, ListenSettings, NamedKey
from services.launch.launcher import WorkerLaunch, WorkerLauncher
from services.launch.process_tuning import keep_loaded_objects
from services.scheduler.epochs import EpochAuthority, MemoryRegister
from services.scheduler.service import SchedulerService
from services.scheduler.workers.worker_link import LinkOptions, WorkerEndpoint
from services.scheduler_client.local import LocalBackend
from services.text.tokenizer import load_tokenizer

FLOOD, SINGLE = "flood", "single"
_SETTLE_SECONDS = 10.0


@asynccontextmanager
async def serving(arguments: argparse.Namespace, folder: Path) -> AsyncIterator[tuple[str, SchedulerService]]:
    """The gateway's address, and the scheduler behind it, for the model in this folder."""
    keys = tuple(KeyClass(name) for name in (FLOOD, SINGLE))
    named = tuple(NamedKey(name=key.name, digest=hashlib.sha256(key.name.encode()).hexdigest()) for key in keys)
    config = SchedulerConfig(keys=keys)
    engine = {"model": str(folder), "dtype": "float32", "threads": 1, "kv_memory_bytes": arguments.kv_mib << 20}
    launches = [WorkerLaunch(Role.TARGET, engine, threads=1) for _ in range(arguments.targets)]
    async with (
        WorkerLauncher(launches) as launcher,
        SchedulerService(
            config,
            scheduler_epoch=await EpochAuthority(MemoryRegister()).claim(),
            link_options=LinkOptions(connect_timeout=60.0, step_timeout=600.0),
        ) as service,
    ):
        await service.add_workers([WorkerEndpoint(one.worker_id, one.role, one.address) for one in launcher.workers])
        app = create_app(LocalBackend(service), load_tokenizer(str(folder)), GatewaySettings(named_keys=named))
        async with HttpServer(app, ListenSettings(), drain_seconds=1.0) as server:
            keep_loaded_objects()
            yield server.url, service


async def client(load: str, url: str, arguments: argparse.Namespace, **more: object) -> asyncio.subprocess.Process:
    """A process of bench/fairness/clients.py."""
    options = {"key": load, "prompt": arguments.prompt, **more}
    named = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "bench.fairness.clients", load, url, *named]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)


async def single(name: str, url: str, arguments: argparse.Namespace) -> list[float]:
    """Seconds to the first token of each request of the key that asks once a second."""
    process = await client(
        SINGLE, url, arguments, name=name, requests=arguments.requests, output=arguments.single_tokens
    )
    printed, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the client that asks once a second ended with {process.returncode}")
    waits: list[float] = json.loads(printed)
    return waits


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    async with serving(arguments, folder) as (url, service):
        alone = await single("alone", url, arguments)
        flood = await client(FLOOD, url, arguments, streams=arguments.streams, output=arguments.flood_tokens)
        assert flood.stdin is not None
        assert flood.stdout is not None
        try:
            await flood.stdout.readline()
            await asyncio.sleep(_SETTLE_SECONDS)  # or all of the flood's streams would be at the same token
            service.reset_statistics()
            before, began, processor = service.core.snapshot(), time.monotonic(), time.process_time()
            flooded = await single("flooded", url, arguments)
            seconds, after, steps = time.monotonic() - began, service.core.snapshot(), service.statistics()
            processor = time.process_time() - processor
        finally:
            flood.stdin.close()
            ended = await flood.wait()
    if ended:
        raise RuntimeError(f"the flood's client ended with {ended}")
    served = {key.name: key.output_tokens for key in after.keys}[FLOOD]
    served -= {key.name: key.output_tokens for key in before.keys}[FLOOD]
    figures = {"alone": percentiles(alone), "flooded": percentiles(flooded)}
    return {
        "targets": arguments.targets,
        "streams": arguments.streams,
        "requests": arguments.requests,
        "prompt_tokens": arguments.prompt,
        "single_tokens": arguments.single_tokens,
        "flood_tokens": arguments.flood_tokens,
        "scheduling": {
            "max_running": service.config.max_running,
            "batch_size": service.config.batch_size,
            "prefill_chunk": service.config.prefill_chunk,
        },
        "step_seconds": arguments.step,
        "token_seconds": arguments.token,
        "first_token_seconds": figures,
        "ratio": {name: figures["flooded"][name] / figures["alone"][name] for name in figures["alone"]},
        "flood_tokens_per_second": served / seconds,
        "flooded_step_seconds": steps.busy_seconds["target"] / steps.target_steps,
        "scheduler_and_gateway_processor_share": processor / seconds,
        "preemptions": after.preemptions - before.preemptions,
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": percentile(seconds, percent) for percent in (50, 90, 99)}


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="seconds to the first token of the key that asks once a second")
    for column in ("", "p50", "p90", "p99"):
        shown.add_column(column)
    for name, figures in [*result["first_token_seconds"].items(), ("ratio", result["ratio"])]:
        shown.add_row(name, *(f"{figures[percent]:.3f}" for percent in ("p50", "p90", "p99")))
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=2)
    parser.add_argument("--requests", type=int, default=120, help="single requests, one each second, in each part")
    parser.add_argument("--streams", type=int, default=200, help="streams of the flood")
    parser.add_argument("--prompt", type=int, default=600, help="tokens of every prompt")
    parser.add_argument("--flood-tokens", type=int, default=100)
    parser.add_argument("--single-tokens", type=int, default=8)
    parser.add_argument("--step", type=float, default=0.015, help="seconds of a step of a target")
    parser.add_argument("--token", type=float, default=0.00004, help="seconds of each token in it")
    parser.add_argument("--kv-mib", type=int, default=256)
    parser.add_argument("--json", type=Path, help="where the result goes")
    arguments = parser.parse_args(argv)
    pace = Pace(arguments.step, arguments.token, draft_pass=0.0, draft_sequence=0.0)
    with tempfile.TemporaryDirectory(prefix="spool-fairness-") as name, paced(pace):
        folder, shape = Path(name), SHAPES["tiny"]().target
        write_model(folder, shape, torch.randperm(shape.vocab_size), seed=0, dtype=torch.float32)
        save_tokenizer(folder, shape.vocab_size)
        result = asyncio.run(measure(arguments, folder))
    Console().print(table(result))
    if arguments.json is not None:
        command = f"python -m bench.fairness {' '.join(sys.argv[1:] if argv is None else argv)}".strip()
        write_result(arguments.json, command, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
