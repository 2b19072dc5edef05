"""Kills and stops processes of a served application under constant load, and measures how long streams pause.

    spool serve --detach --set groups.draft.replicas=2 --set groups.target.replicas=2
    python -m bench.chaos --rounds 3 --output bench/results/chaos.json

`spool serve` must run on a Ray of its own on this machine. In each round, a draft worker, a target worker and the
scheduler are killed, and a draft and a target worker are stopped for `--stop-seconds`. The exit code is 1 unless every
stream has the text of plain decoding before the faults.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from bench.chaos.application import DRAFT, TARGET, Application, ApplicationError, running_application, watching
from bench.chaos.faults import Faults
from bench.chaos.pauses import Window, pauses
from bench.chaos.streams import ConstantLoad, cases, faults_of, plain_answers, streaming
from bench.record import write_result
from spool.deploy.errors import RunError

_IDLE_SECONDS = 30.0


async def measure(application: Application, arguments: argparse.Namespace) -> dict[str, Any]:
    async with streaming(application) as client, watching(application) as watcher:
        asked = cases(arguments.cases, arguments.max_tokens)
        expected = await plain_answers(client, asked)
        first = await watcher.until(lambda _: True, "a load report", 60)
        struck: dict[str, Window] = {}
        async with ConstantLoad(client, asked, arguments.clients) as load:
            counts = {role: len(workers) for role, workers in first.workers.items()}
            faults = Faults(application, watcher, load, counts)
            await asyncio.sleep(arguments.undisturbed_seconds / 2)
            begin = time.monotonic()
            await asyncio.sleep(arguments.undisturbed_seconds / 2)
            struck["none"] = Window(begin, time.monotonic())
            for number in range(1, arguments.rounds + 1):
                struck[f"SIGKILL of a draft worker, {number}"] = (await faults.kill_worker(DRAFT)).window
                struck[f"SIGKILL of a target worker, {number}"] = (await faults.kill_worker(TARGET)).window
                struck[f"SIGKILL of the scheduler, {number}"] = (await faults.kill_scheduler()).window
                for name, deployment in (("draft", DRAFT), ("target", TARGET)):
                    stopped = await faults.stop_worker(deployment, arguments.stop_seconds)
                    struck[f"SIGSTOP of a {name} worker for {arguments.stop_seconds:g} s, {number}"] = stopped.window
        idle = await watcher.until(lambda report: report.idle, "idle", _IDLE_SECONDS)
    return {
        "streams": {"at_once": arguments.clients, "answered": sum(record.answered for record in load.records)},
        "tokens": sum(record.tokens for record in load.records),
        "wrong": faults_of(load.records, expected),
        "faults": [{"fault": name} | pauses(load.records, window) for name, window in struck.items()],
        "left": {"sequences": idle.sequences, "pages": idle.pages_in_use},
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32, help="streams at once")
    parser.add_argument("--cases", type=int, default=32, help="different requests")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--stop-seconds", type=float, default=20.0)
    parser.add_argument("--undisturbed-seconds", type=float, default=20.0)
    parser.add_argument("--output", type=Path, default=Path("chaos.json"))
    arguments = parser.parse_args(argv)
    try:
        result = asyncio.run(measure(running_application(), arguments))
    except (RunError, ApplicationError) as error:
        print(f"bench.chaos: {error}", file=sys.stderr)
        return 1
    write_result(arguments.output, shlex.join(["python", "-m", "bench.chaos", *argv]), result)
    print(json.dumps(result["faults"], indent=2))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
