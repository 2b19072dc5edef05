"""Sends prompts that kill the target worker that computes them to a served application under constant load.

One a second, for `--seconds`. Exit code 1 if another stream fails or differs from plain decoding, if more than two
target workers are lost for a prompt, or if one of these prompts gets anything but an error. Without `--config`, it is
the demo pair with one draft and two target workers.

    python -m bench.chaos.poison --seconds 60 --output bench/results/poison.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.chaos.application import Application, Watcher, served, watching
from bench.chaos.options import add_options, environment_of, overrides
from bench.chaos.pauses import Window, pauses
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
from bench.record import write_result

HOOK = Path(__file__).with_name("poison_hook")
POISON = (18, 11, 17, 12, 16, 13, 15, 14)
"""Token ids that no prompt of the others has."""
MOST_LOST = 2
"""Target workers that one poisoned prompt may take."""

_DEMO = ("groups.target.replicas=2",)
_CONVICTED = "a target worker was lost while it computed this sequence"
_IDLE_SECONDS = 300.0


def environment() -> dict[str, str]:
    """Of the target workers: with this they die of a poisoned prompt."""
    path = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "SPOOL_POISON": ",".join(map(str, POISON))}


async def poison(client: StreamClient, count: int, interval: float) -> list[StreamRecord]:
    """Sends so many poisoned prompts, one each `interval` seconds, and waits for what becomes of all of them."""
    protocols = itertools.cycle(Protocol)

    async def one(number: int) -> StreamRecord:
        await asyncio.sleep(number * interval)
        record = await client.ask(Case((*POISON, 20 + number), number, 0.0, 16), next(protocols))
        print(f"poison {number}: {record.error}", file=sys.stderr, flush=True)
        return record

    return await asyncio.gather(*map(one, range(count)))


def faults_of_poisons(poisons: list[StreamRecord], lost: int) -> Iterator[str]:
    """What is wrong with the errors of poisoned prompts, or with how many workers they took with them."""
    for record in poisons:
        if _CONVICTED not in record.error:
            yield f"{record.protocol.value}: poison was answered with {record.error or record.text!r}"
    if lost > MOST_LOST * len(poisons):
        yield f"{lost} workers were lost for {len(poisons)} poisoned prompts"


async def measure(application: Application, asked: list[Case], streams: int, count: int) -> dict[str, Any]:
    async with streaming(application) as client, watching(application) as watcher:
        expected = await plain_answers(client, asked)
        before = application.workers_lost()
        async with ConstantLoad(client, asked, streams) as load:
            await _all_went_on(watcher, load)
            begin = time.monotonic()
            poisons = await poison(client, count, 1.0)
            struck = Window(begin, time.monotonic())
            lost = application.workers_lost() - before
            await _all_went_on(watcher, load)
        idle = await watcher.until(lambda report: report.idle, "idle", _IDLE_SECONDS)
    return {
        "poisons": count,
        "targets_lost": lost,
        "streams": {"at_once": streams, "answered": sum(record.answered for record in load.records)},
        "tokens": sum(record.tokens for record in load.records),
        "wrong": [*faults_of(load.records, expected), *faults_of_poisons(poisons, lost)],
        "pauses": pauses(load.records, struck),
        "left": {"sequences": idle.sequences, "pages": idle.pages_in_use},
    }


async def _all_went_on(watcher: Watcher, load: ConstantLoad) -> None:
    now = time.monotonic()
    await watcher.until(lambda _: load.all_went_on(now), "something for every stream", _IDLE_SECONDS)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("poison.json"))
    arguments = parser.parse_args(argv)
    settings = [*overrides(arguments, _DEMO), *environment_of("target", environment())]
    asked = cases(arguments.cases, arguments.max_tokens)
    with served(arguments.config, settings) as application:
        result = asyncio.run(measure(application, asked, arguments.clients, arguments.seconds))
    command = f"python -m bench.chaos.poison {' '.join(sys.argv[1:] if argv is None else argv)}".strip()
    write_result(arguments.output, command, result)
    longest, median = result["pauses"]["longest"], result["pauses"]["median"]
    print(f"{result['targets_lost']} targets lost for {result['poisons']} poisons; longest pause {longest}, {median}")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
