"""A served application under more load than it sustains: what becomes of requests, refusals and memory.

First every request is answered once by plain decoding, undisturbed. Then a closed loop of `--clients` measures how many
requests a second are sustained. Then requests arrive at `--factor` times that rate, as a Poisson process, half of them
over HTTP and half over gRPC, for `--minutes`. Exit code 1 unless every accepted request was answered as before, every
other one was refused with 429 or RESOURCE_EXHAUSTED, no process's memory grew by more than `--growth` of itself, no
worker was lost, and no sequence and no page is left in the end. Without `--config`, it is the demo pair.

    python -m bench.overload --minutes 10 --output bench/results/overload.json
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.chaos.application import DEPLOYMENTS, Application, served, watching
from bench.chaos.streams import (
    Case,
    ConstantLoad,
    Protocol,
    StreamClient,
    StreamRecord,
    cases,
    faults_of,
    plain_answers,
    streaming,
)
from bench.memory import MemorySamples, summarise
from bench.record import write_result
from bench.serving.load import PERCENTILES, percentile, poisson_arrivals

_DEMO = ("scheduling.max_queued_sequences=64",)
_SAMPLES = 100
_IDLE_SECONDS = 30.0
# Caches fill in the first tenths of the time.
_SETTLED_TENTH = 3


@dataclass(frozen=True)
class Overload:
    """`clients` are those of the closed loop, which lasts `closed_seconds`; the overload lasts `seconds`."""

    clients: int
    closed_seconds: float
    factor: float
    seconds: float
    cases: int
    max_tokens: int
    seed: int = 0


async def measure(application: Application, plan: Overload) -> dict[str, Any]:
    """Raises ApplicationError where the application does not become idle."""
    samples = MemorySamples()
    async with streaming(application) as client, watching(application) as watcher:
        asked = cases(plan.cases, plan.max_tokens)
        expected = await plain_answers(client, asked)
        sustained, closed = await closed_loop(client, asked, plan)
        print(f"{sustained:.2f} requests/s are sustained", file=sys.stderr, flush=True)
        arrivals = poisson_arrivals(plan.factor * sustained, plan.seconds, plan.seed)
        watch = asyncio.create_task(watch_memory(application, samples, plan.seconds / _SAMPLES))
        try:
            opened = await open_loop(client, asked, arrivals)
        finally:
            watch.cancel()
            await asyncio.wait([watch])
        ended = time.monotonic()
        left = await watcher.until(lambda report: report.idle, "no sequence and no page", _IDLE_SECONDS)
        idle_after = time.monotonic() - ended
    processes = summarise(samples, {})
    refused = [record for record in opened if record.refused]
    answered = [record for record in opened if record.answered]
    return {
        "sustained_requests_per_second": sustained,
        "offered_requests_per_second": plan.factor * sustained,
        "seconds": plan.seconds,
        "requests": len(opened),
        "answered": len(answered),
        "tokens": sum(record.tokens for record in answered),
        "refused": {protocol.value: sum(one.protocol is protocol for one in refused) for protocol in Protocol},
        "refusal_seconds": percentiles(refused),
        "answer_seconds": percentiles(answered),
        "wrong": faults_of([*closed, *opened], expected),
        "left": {"sequences": left.sequences, "pages": left.pages_in_use},
        "seconds_until_idle": idle_after,
        "workers_lost": application.workers_lost(),
        "processes": processes,
        "memory_growth": {name: growth(figures["pss_mib_by_tenth"]) for name, figures in processes.items()},
    }


async def closed_loop(
    client: StreamClient, asked: Sequence[Case], plan: Overload
) -> tuple[float, Sequence[StreamRecord]]:
    """Requests a second, by what was delivered from the second quarter of the time on; and the records of all."""
    async with ConstantLoad(client, asked, plan.clients) as load:
        await asyncio.sleep(plan.closed_seconds / 4)
        begin = time.monotonic()
        await asyncio.sleep(plan.closed_seconds * 3 / 4)
        end = time.monotonic()
    deliveries = sum(begin < arrival <= end for record in load.records for arrival in record.arrivals)
    deliveries_of_one = sum(len(record.arrivals) for record in load.records) / len(load.records)
    return deliveries / deliveries_of_one / (end - begin), load.records


async def open_loop(client: StreamClient, asked: Sequence[Case], arrivals: Sequence[float]) -> list[StreamRecord]:
    """A request at each time of arrival, whatever became of those before; waits for the last to end."""
    begin = time.monotonic()
    protocols = list(Protocol)
    asks = []
    for number, due in enumerate(arrivals):
        await asyncio.sleep(max(begin + due - time.monotonic(), 0.0))
        case, protocol = asked[number % len(asked)], protocols[number // len(asked) % len(protocols)]
        asks.append(asyncio.create_task(client.ask(case, protocol)))
    return await asyncio.gather(*asks)


async def watch_memory(application: Application, samples: MemorySamples, interval: float) -> None:
    """Adds the proportional set size of every replica again and again, until cancelled."""
    processes = {
        f"{deployment} {number}": process
        for deployment in DEPLOYMENTS
        for number, process in enumerate(application.replicas(deployment))
    }
    while True:
        for name, process in processes.items():
            samples.pss.setdefault(name, []).append(await asyncio.to_thread(_pss, process))
        await asyncio.sleep(interval)


def _pss(process: psutil.Process) -> int:
    size: int = process.memory_full_info().pss
    return size


def growth(by_tenth: Sequence[float]) -> float:
    """From the third tenth of the time to the last one, as a part of the former."""
    settled = by_tenth[min(_SETTLED_TENTH, len(by_tenth)) - 1]
    return by_tenth[-1] / settled - 1


def percentiles(records: Sequence[StreamRecord]) -> dict[str, float] | None:
    """Of the seconds from a request to its end."""
    seconds = [record.ended - record.began for record in records]
    return {f"p{percent}": percentile(seconds, percent) for percent in PERCENTILES} if seconds else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a spool.yaml")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="FIELD=VALUE")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--closed-seconds", type=float, default=60.0)
    parser.add_argument("--cases", type=int, default=32, help="different requests")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--growth", type=float, default=0.05)
    parser.add_argument("--output", type=Path, default=Path("overload.json"))
    arguments = parser.parse_args(argv)
    overload = Overload(
        arguments.clients,
        arguments.closed_seconds,
        arguments.factor,
        60 * arguments.minutes,
        arguments.cases,
        arguments.max_tokens,
    )
    overrides = [*(() if arguments.config is not None else _DEMO), *arguments.overrides]
    with served(arguments.config, overrides) as application:
        result = asyncio.run(measure(application, overload))
    command = f"python -m bench.overload {' '.join(sys.argv[1:] if argv is None else argv)}".strip()
    write_result(arguments.output, command, result)
    grew = max(result["memory_growth"].values()) > arguments.growth
    return 1 if result["wrong"] or result["workers_lost"] or grew else 0


if __name__ == "__main__":
    sys.exit(main())
