"""Kills and stops the processes of a served application under constant load, and measures how long streams stand still.

A draft worker, a target worker and the scheduler are killed, and a target worker is stopped for `--stop-seconds`, one
after the other, `--rounds` times. Every stream's text must be that of plain decoding before the faults, with no token
more or less. Exit code 1 if one is not. Without `--config`, it is the demo pair with two draft and two target workers.

    python -m bench.chaos --rounds 3 --output bench/results/chaos.json
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from bench import pacing
from bench.chaos.application import DRAFT, TARGET, Application, served, watching
from bench.chaos.faults import Faults, Struck
from bench.chaos.options import add_options, environment_of, overrides
from bench.chaos.pauses import Window, pauses
from bench.chaos.streams import ConstantLoad, cases, faults_of, plain_answers, streaming
from bench.record import write_result

_DEMO = ("groups.draft.replicas=2", "groups.target.replicas=2", "gateway.replicas=2")
_IDLE_SECONDS = 30.0


async def measure(application: Application, arguments: argparse.Namespace) -> dict[str, Any]:
    async with streaming(application) as client, watching(application) as watcher:
        asked = cases(arguments.cases, arguments.max_tokens)
        expected = await plain_answers(client, asked)
        counts = {role: len(ids) for role, ids in (await watcher.until(lambda _: True, "a load", 60)).workers.items()}
        struck: list[tuple[str, Struck]] = []
        async with ConstantLoad(client, asked, arguments.clients) as load:
            faults = Faults(application, watcher, load, counts)
            begin = time.monotonic()
            await asyncio.sleep(arguments.undisturbed_seconds)
            undisturbed = Window(begin + arguments.undisturbed_seconds / 2, time.monotonic())
            for _ in range(arguments.rounds):
                for name, fault in plan(faults, arguments).items():
                    one = await fault()
                    struck.append((name, one))
                    print(f"{name}: all is well after {one.window.seconds:.1f} s", file=sys.stderr, flush=True)
        idle = await watcher.until(lambda report: report.idle, "idle", _IDLE_SECONDS)
    wrong = faults_of(load.records, expected)
    return {
        "streams": {"at_once": arguments.clients, "answered": sum(record.answered for record in load.records)},
        "tokens": sum(record.tokens for record in load.records),
        "wrong": wrong,
        "undisturbed": pauses(load.records, undisturbed),
        "faults": [
            {"fault": name, "stages": dict(one.stages)} | pauses(load.records, one.window) for name, one in struck
        ],
        "left": {"sequences": idle.sequences, "pages": idle.pages_in_use},
    }


def plan(faults: Faults, arguments: argparse.Namespace) -> Mapping[str, Callable[[], Awaitable[Struck]]]:
    seconds = arguments.stop_seconds
    faults_in_turn: dict[str, Callable[[], Awaitable[Struck]]] = {
        "SIGKILL of a draft worker": lambda: faults.kill_worker(DRAFT),
        "SIGKILL of a target worker": lambda: faults.kill_worker(TARGET),
        "SIGKILL of the scheduler": faults.kill_scheduler,
        f"SIGSTOP of a target worker for {seconds:g} s": lambda: faults.stop_target(seconds),
    }
    if arguments.stop_scheduler:
        faults_in_turn["SIGSTOP of the scheduler until it is replaced"] = faults.stop_scheduler
    return faults_in_turn


def paced(seconds: float | None) -> list[str]:
    """Words for `--set`, with which workers sleep until their steps have taken so long."""
    if seconds is None:
        return []
    pace = pacing.Pace(target_step=seconds, target_token=0.0, draft_pass=seconds / 4, draft_sequence=0.0)
    return [word for group in ("target", "draft") for word in environment_of(group, pacing.environment(pace))]


def table(result: Mapping[str, Any]) -> str:
    """For docs/recovery.md."""
    lines = [
        "| fault | longest pause, s | median pause, s | no stream progressed for, s | fully recovered after, s |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows = [{"fault": "none"} | result["undisturbed"], *result["faults"]]
    for row in rows:
        figures = [row["longest"], row["median"], row["whole_cell"], row["window"] if row["fault"] != "none" else None]
        cells = ["" if figure is None else f"{figure:.2f}" for figure in figures]
        lines.append(f"| {' | '.join([row['fault'], *cells])} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument(
        "--pace", type=float, metavar="SECONDS", help="what a target's step takes, and four passes of a draft"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--stop-seconds", type=float, default=20.0)
    parser.add_argument("--stop-scheduler", action="store_true", help="and stop the scheduler until it is replaced")
    parser.add_argument("--undisturbed-seconds", type=float, default=20.0)
    parser.add_argument("--output", type=Path, default=Path("chaos.json"))
    arguments = parser.parse_args(argv)
    settings = [*overrides(arguments, _DEMO), *paced(arguments.pace)]
    with served(arguments.config, settings) as application:
        result = asyncio.run(measure(application, arguments))
    command = f"python -m bench.chaos {' '.join(sys.argv[1:] if argv is None else argv)}".strip()
    write_result(arguments.output, command, result)
    print(table(result))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
