"""`spool bench serve`: a running server under requests that come whether or not it keeps up with them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from rich.table import Table

from bench.machine import describe_machine
from bench.offline.inputs import bench_prompts
from bench.offline.results_file import comparable_content, output_digest, shown_command, today, write_whole
from bench.record import RESULTS, commit_of
from bench.serving.clients import Asked, LoadClient, RefusedError, RequestFailedError, grpc_client, http_client
from bench.serving.load import Ending, LatencyBound, RequestRecord, poisson_arrivals, summarise_load
from bench.serving.options import BenchServeSettings
from deploy.cli.chat import KEY_VARIABLE
from deploy.errors import UsageError
from deploy.event_loop import run_until_interrupted
from deploy.offline.prompts import Prompt
from deploy.progress import Reporter, error_console, reporting

_KIND = "serve"
_REPORT_SECONDS = 0.5


def bench_serve(settings: BenchServeSettings) -> int:
    """Exit code 0. Raises `UsageError`; what was measured until then is kept."""
    prompts = bench_prompts(settings.inputs)
    console = error_console()
    machine, described = describe_machine(), _comparable(settings, prompts)
    content = comparable_content(settings.output, _KIND, described, machine)
    content.setdefault("loads", [])
    content["commands"] = list(dict.fromkeys([*content.get("commands", []), shown_command(sys.argv[1:])]))
    with reporting(console) as reporter:
        run_until_interrupted(_measure_all(settings, prompts, content, reporter))
    console.print(loads_table(content["loads"]))
    console.print(f"everything is in {settings.output}", highlight=False, markup=False)
    if settings.json_output:
        print(json.dumps({"command": "bench serve", "settings": described, "loads": content["loads"]}), flush=True)
    return 0


async def _measure_all(
    settings: BenchServeSettings, prompts: Sequence[Prompt], content: dict[str, Any], reporter: Reporter
) -> None:
    bound = LatencyBound(settings.first_token_bound, settings.token_bound)
    async with _client(settings) as client:
        await _warm_up(client, prompts[0])
        for rate in dict.fromkeys(settings.rate):
            if any(load["rate"] == rate for load in content["loads"]):
                continue
            arrivals = poisson_arrivals(rate, settings.seconds, settings.seed)
            records = await run_load(client, prompts, arrivals, settings.seed, f"{rate:g} requests/s", reporter)
            content["loads"].append({"rate": rate} | summarise_load(records, bound))
            content["date"] = today()
            content["commits"] = sorted({*content.get("commits", []), commit_of(RESULTS.parent)})
            write_whole(settings.output, content)


async def run_load(
    client: LoadClient, prompts: Sequence[Prompt], arrivals: Sequence[float], seed: int, title: str, reporter: Reporter
) -> list[RequestRecord]:
    """Sends a request at each time of arrival, the prompts in turn, and waits for the last to end."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    records = [RequestRecord(due) for due in arrivals]
    ended = 0

    def now() -> float:
        return loop.time() - began

    async def one(index: int, record: RequestRecord) -> None:
        nonlocal ended
        record.sent = now()
        try:
            prompt = prompts[index % len(prompts)]
            record.tokens = await client.ask(prompt, seed + index, lambda: record.deliveries.append(now()))
            record.ending = Ending.ANSWERED
        except RefusedError:
            record.ending = Ending.REFUSED
        except RequestFailedError as error:
            record.error = str(error)
        record.ended = now()
        ended += 1

    async def report() -> None:
        while True:
            reporter.run(title, ended, len(records), None)
            await asyncio.sleep(_REPORT_SECONDS)

    async with asyncio.TaskGroup() as group:
        reports = group.create_task(report())
        requests = []
        for index, record in enumerate(records):
            await asyncio.sleep(max(record.due - now(), 0.0))
            requests.append(group.create_task(one(index, record)))
        if requests:
            await asyncio.wait(requests)
        reports.cancel()
    reporter.run(title, ended, len(records), None)
    return records


def _comparable(settings: BenchServeSettings, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Settings that all loads in one file must share."""
    fields = ("grpc", "model", "seconds", "max_tokens", "temperature", "seed", "speculation")
    digests = [int(prompt.digest, 16) for prompt in prompts]
    return {name: getattr(settings, name) for name in fields} | {
        "prompts": len(prompts),
        "prompts_digest": output_digest(digests),
        "first_token_bound": settings.first_token_bound,
        "token_bound": settings.token_bound,
    }


def loads_table(loads: Sequence[dict[str, Any]]) -> Table:
    """One row a rate."""
    table = Table(title="percentiles 50 / 90 / 99", title_justify="left")
    for heading in (
        "requests/s",
        "answered",
        "refused",
        "failed",
        "tokens/s",
        "goodput",
        "first token s",
        "a token ms",
    ):
        table.add_column(heading, justify="right")
    for load in loads:
        table.add_row(*load_columns(load))
    return table


def load_columns(load: dict[str, Any]) -> list[str]:
    """The texts of one row of `loads_table`."""
    return [
        f"{load['rate']:g}",
        f"{load['answered']} of {load['requests']}",
        str(load["refused"]),
        str(load["failed"]),
        f"{load['tokens_per_second']:.1f}",
        f"{load['goodput']:.2f}",
        _percentiles(load["first_token_seconds"], 1.0, 2),
        _percentiles(load["seconds_per_token"], 1000.0, 0),
    ]


def _percentiles(found: dict[str, float] | None, factor: float, digits: int) -> str:
    return " / ".join(f"{value * factor:.{digits}f}" for value in found.values()) if found else ""


def _client(settings: BenchServeSettings) -> AbstractAsyncContextManager[LoadClient]:
    asked = Asked(settings.max_tokens, settings.temperature, settings.timeout, settings.speculation)
    key = settings.api_key or os.environ.get(KEY_VARIABLE) or "none"
    if settings.grpc is not None:
        return grpc_client(settings.grpc, key, asked)
    return http_client(settings.url, key, settings.model, asked)


async def _warm_up(client: LoadClient, prompt: Prompt) -> None:
    try:
        await client.ask(prompt, 0, lambda: None)
    except (RefusedError, RequestFailedError) as error:
        raise UsageError(f"the server does not answer a first request: {error}") from error
