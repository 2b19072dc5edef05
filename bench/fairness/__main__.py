"""How long one key's requests wait for their first token, alone and while another key floods the server.

One target worker and prompt lookup run in processes of their own, with steps that take as long as `--step` and
`--token` say (bench/pacing), or longer where the processor needs longer; a scheduler and an HTTP gateway run here. The
key `single` asks once a second, first alone, then while the key `flood` keeps `--streams` streams open. Both weigh the
same.

    python -m bench.fairness --json bench/results/fairness.json
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.distill.stages import Stage, showing
from bench.pacing import Pace, paced
from bench.record import write_result
from bench.serving.load import percentile
from engine.models.fetching import fetch_model
from engine.models.source import resolve_model
from scheduler.config import SchedulerConfig
from scheduler.key_class import KeyClass
from scheduler.messages import Role
from services.gateway.http.app import create_app
from services.gateway.http.server import HttpServer
from services.gateway.settings import GatewaySettings, ListenSettings, NamedKey
from services.launch.launcher import WorkerLaunch, WorkerLauncher
from services.scheduler.epochs import EpochAuthority, MemoryRegister
from services.scheduler.service import SchedulerService
from services.scheduler.workers.worker_link import LinkOptions, WorkerEndpoint
from services.scheduler_client.local import LocalBackend
from services.text.tokenizer import load_tokenizer

FLOOD, SINGLE = "flood", "single"
_TIMEOUT = 600.0
_INTERVAL = 1.0


class Clients:
    """Streams completions of both keys over HTTP."""

    def __init__(self, http: httpx.AsyncClient, arguments: argparse.Namespace) -> None:
        self._http = http
        self._arguments = arguments
        self.flood_pieces = 0
        self.flooded = asyncio.Event()
        """The flood has begun: a stream of it has got something."""

    async def single(self, number: int) -> float:
        """Seconds from a request of the key `single` to its first token. Raises httpx.HTTPError."""
        body = {"prompt": f"Tell me about the number {number}.", "max_tokens": self._arguments.single_tokens}
        began, first = time.perf_counter(), None
        async for _ in self._pieces(SINGLE, body):
            first = first or time.perf_counter()
        if first is None:
            raise httpx.StreamError(f"request {number} ended without a token")
        return first - began

    async def flood(self, number: int) -> None:
        """One stream of the key `flood`, and another one after each."""
        while True:
            text = f"{number}) Once upon a time, " * self._arguments.flood_repeats
            async for _ in self._pieces(FLOOD, {"prompt": text, "max_tokens": self._arguments.flood_tokens}):
                self.flood_pieces += 1
                self.flooded.set()
            number += self._arguments.streams

    async def _pieces(self, key: str, body: dict[str, Any]) -> AsyncIterator[None]:
        # Special tokens have a text here, so that no token is without one.
        more = {"stream": True, "ignore_eos": True, "skip_special_tokens": False, "temperature": 0}
        headers = {"authorization": f"Bearer {key}"}
        async with self._http.stream("POST", "/v1/completions", json=body | more, headers=headers) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise httpx.StreamError(event["error"]["message"])
                    yield


async def asked_once_a_second(clients: Clients, count: int, stage: Stage, name: str) -> list[float]:
    """Seconds to the first token of each request, sent whatever became of those before."""
    show, asks = stage(name), []
    begin = time.monotonic()
    for number in range(count):
        await asyncio.sleep(max(begin + number * _INTERVAL - time.monotonic(), 0.0))
        asks.append(asyncio.create_task(clients.single(number)))
        show(number / count, f"{number} of {count}")
    waits = await asyncio.gather(*asks)
    show(1.0, f"{count} of {count}")
    return waits


@asynccontextmanager
async def serving(arguments: argparse.Namespace) -> AsyncIterator[tuple[str, SchedulerService]]:
    """The gateway's address, and the scheduler behind it."""
    source = resolve_model(arguments.target, Role.TARGET)
    folder = source.folder or fetch_model(source, lambda message, fraction: None)
    keys = tuple(KeyClass(name) for name in (FLOOD, SINGLE))
    named = tuple(NamedKey(name=key.name, digest=hashlib.sha256(key.name.encode()).hexdigest()) for key in keys)
    config = SchedulerConfig(max_running=arguments.max_running, max_queued_sequences=100_000, keys=keys)
    engine = {"model": arguments.target, "threads": 1, "kv_memory_bytes": arguments.kv_mib << 20}
    launches = [WorkerLaunch(Role.TARGET, engine, threads=1), WorkerLaunch(Role.DRAFT, {"model": "ngram"}, threads=1)]
    async with (
        WorkerLauncher(launches) as launcher,
        SchedulerService(
            config,
            scheduler_epoch=await EpochAuthority(MemoryRegister()).claim(),
            link_options=LinkOptions(connect_timeout=60.0, step_timeout=600.0),
        ) as service,
    ):
        await service.add_workers([WorkerEndpoint(one.worker_id, one.role, one.address) for one in launcher.workers])
        settings = GatewaySettings(named_keys=named)
        app = create_app(LocalBackend(service), load_tokenizer(str(folder)), settings)
        async with HttpServer(app, ListenSettings(), drain_seconds=1.0) as server:
            yield server.url, service


async def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with (
        serving(arguments) as (url, service),
        httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, limits=limits) as http,
    ):
        clients = Clients(http, arguments)
        with showing(console) as stage:
            await clients.single(-1)  # makes connections and kernels
            alone = await asked_once_a_second(clients, arguments.requests, stage, "alone")
            floods = [asyncio.create_task(clients.flood(number)) for number in range(arguments.streams)]
            try:
                await clients.flooded.wait()
                service.reset_statistics()
                before, began = clients.flood_pieces, time.monotonic()
                flooded = await asked_once_a_second(clients, arguments.requests, stage, "beside the flood")
                rate = (clients.flood_pieces - before) / (time.monotonic() - began)
                steps = service.statistics()
            finally:
                for one in floods:
                    one.cancel()
                ends = await asyncio.gather(*floods, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        preemptions = service.core.snapshot().preemptions
    figures = {"alone": percentiles(alone), "flooded": percentiles(flooded)}
    return {
        "streams": arguments.streams,
        "requests": arguments.requests,
        "max_running": arguments.max_running,
        "step_seconds": arguments.step,
        "token_seconds": arguments.token,
        "first_token_seconds": figures,
        "ratio": {name: figures["flooded"][name] / figures["alone"][name] for name in figures["alone"]},
        "flood_pieces_per_second": rate,
        "flooded_step_seconds": steps.busy_seconds["target"] / steps.target_steps,
        "preemptions": preemptions,
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": percentile(seconds, percent) for percent in (50, 99)}


def table(result: dict[str, Any]) -> Table:
    shown = Table(title="seconds to the first token of the key that asks once a second")
    for column in ("", "p50", "p99"):
        shown.add_column(column)
    for name, figures in [*result["first_token_seconds"].items(), ("ratio", result["ratio"])]:
        shown.add_row(name, *(f"{figures[percent]:.3f}" for percent in ("p50", "p99")))
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo", help="a model's folder or id")
    parser.add_argument("--requests", type=int, default=60, help="single requests, one each second, in each part")
    parser.add_argument("--streams", type=int, default=200, help="streams of the flood")
    parser.add_argument("--max-running", type=int, default=48)
    parser.add_argument("--flood-repeats", type=int, default=10, help="length of the flood's prompts, in sentences")
    parser.add_argument("--flood-tokens", type=int, default=100)
    parser.add_argument("--single-tokens", type=int, default=8)
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a step of the target")
    parser.add_argument("--token", type=float, default=0.0001, help="seconds of each token in it")
    parser.add_argument("--kv-mib", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="where the result goes")
    arguments = parser.parse_args(argv)
    pace = Pace(arguments.step, arguments.token, draft_pass=0.0, draft_sequence=0.0)
    with paced(pace):
        result = asyncio.run(measure(arguments, Console(stderr=True)))
    Console().print(table(result))
    if arguments.json is not None:
        command = f"python -m bench.fairness {' '.join(sys.argv[1:] if argv is None else argv)}".strip()
        write_result(arguments.json, command, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
