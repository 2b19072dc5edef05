"""Streams over HTTP beside offline decoding of the same prompts, both in one run. JSON on the last line.

    python -m bench.record served_streams -- python -m bench.serving.streams --prompts FILE --count 48

A whole application runs on this machine, with Ray and gateway, and so do its clients: each of N asks for the next
prompt as soon as its last one was answered. Offline, `spool bench offline` decodes the same prompts N at a time. Both
take turns at each N; the figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.chaos.application import served
from bench.offline.inputs import bench_prompts
from bench.offline.options import BenchInputs
from bench.serving.clients import Asked, LoadClient, http_client
from deploy.offline.prompts import Prompt
from engine.cpu.isa import AUTO, chosen_isa

_SECONDS_A_REQUEST = 600.0


async def ask_all(client: LoadClient, prompts: Sequence[Prompt], streams: int) -> tuple[int, float]:
    """Tokens of all answers, and the seconds that they took. Raises what a client raises for a request that failed."""
    waiting = list(reversed(list(enumerate(prompts))))
    tokens = 0

    async def one_client() -> None:
        nonlocal tokens
        while waiting:
            index, prompt = waiting.pop()
            # Not in one statement: it would add to what the sum was before the answer.
            answered = await client.ask(prompt, index, lambda: None)
            tokens += answered

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(one_client())
    return tokens, time.perf_counter() - began


async def measure_served(url: str, prompts: Sequence[Prompt], streams: int, max_tokens: int) -> float:
    """Tokens a second."""
    asked = Asked(max_tokens, 0.0, _SECONDS_A_REQUEST, True)
    async with http_client(url, "none", None, asked) as client:
        await ask_all(client, prompts[:streams], streams)
        tokens, seconds = await ask_all(client, prompts, streams)
    return tokens / seconds


def measure_offline(inputs: BenchInputs, draft: str, streams: int, max_tokens: int, folder: Path) -> float:
    """Tokens a second. Raises subprocess.CalledProcessError."""
    output = folder / f"offline-{time.time_ns()}.json"
    command = [str(Path(sys.executable).with_name("spool")), "bench", "offline", "--dtype", "auto", "--repeats", "1"]
    command += ["--policy", "plain" if draft == "none" else "auto", "--batch-size", str(streams)]
    command += ["--max-running-batches", "1", "--max-tokens", str(max_tokens), "--output", str(output)]
    if draft != "none":
        command += ["--draft", draft]
    if inputs.prompts is not None:
        command += ["--prompts", str(inputs.prompts)]
    if inputs.count is not None:
        command += ["--count", str(inputs.count)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    cells = json.loads(output.read_text(encoding="utf-8"))["cells"]
    wanted = [cell for cell in cells if cell["point"]["batch_size"] == streams and cell["tokens_per_second"]]
    return float(wanted[-1]["tokens_per_second"]["median"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=None, help="JSON lines (a few built-in ones)")
    parser.add_argument("--count", type=int, default=None, help="take N evenly spaced ones")
    parser.add_argument("--streams", default="1,4,8,16", help="numbers of streams, separated by commas")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--draft", default="none", help="draft, as for spool generate")
    parser.add_argument("--repeats", type=int, default=2, help="times that each is measured")
    asked = parser.parse_args()
    console = Console(stderr=True)
    inputs = BenchInputs(prompts=asked.prompts, count=asked.count)
    prompts = bench_prompts(inputs)
    numbers = [int(word) for word in asked.streams.split(",")]
    table = Table("streams", "served tokens/s", "offline tokens/s", "served / offline")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for streams in numbers:
            served_speeds, offline_speeds = [], []
            for _ in range(asked.repeats):
                # The draft as it stands in spool.yaml; without one, the target has all cores, as offline.
                overrides = [f"models.draft={asked.draft}", f"scheduling.batch_size={streams}"]
                overrides += [f"groups.target.threads={len(os.sched_getaffinity(0))}"] if asked.draft == "none" else []
                with served(None, overrides) as application:
                    speed = asyncio.run(measure_served(application.url, prompts, streams, asked.max_tokens))
                served_speeds.append(speed)
                offline_speeds.append(measure_offline(inputs, asked.draft, streams, asked.max_tokens, Path(folder)))
                console.print(
                    f"{streams} streams: {speed:.1f} served, {offline_speeds[-1]:.1f} offline", highlight=False
                )
            row = {
                "streams": streams,
                "served_tokens_per_second": statistics.median(served_speeds),
                "offline_tokens_per_second": statistics.median(offline_speeds),
            }
            row["ratio"] = row["served_tokens_per_second"] / row["offline_tokens_per_second"]
            rows.append(row)
            table.add_row(str(streams), *(f"{row[name]:.2f}" for name in list(row)[1:]))
    console.print(table)
    settings = {"prompts": len(prompts), "max_tokens": asked.max_tokens, "draft": asked.draft}
    print(
        json.dumps({**settings, "cpu_isa": chosen_isa(AUTO).name, "repeats": asked.repeats, "loads": rows}), flush=True
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
