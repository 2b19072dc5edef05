"""What Ray costs: the demo served on Ray and without it, in turns, asked by one client over HTTP.

    python -m bench.ray_cost --prompts FILE --output ray_cost.json

Each turn starts the server anew, and asks it with several numbers of streams: every stream sends one request after the
other, each with a prompt of its own. Ratios are of servers that ran one after the other. What Ray takes even if nobody
uses it is the floor: it is measured as plain processes beside a Ray with deployments that do nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx

from bench.idle import empty_application
from bench.record import write_result
from bench.served import Served, serving
from bench.strangers.honest import Streams
from deploy.offline.prompts import load_prompts
from deploy.progress import say

ON_RAY, WITHOUT_RAY, BESIDE_RAY = "on Ray", "without Ray", "without Ray, beside an idle one"

_LONGEST_PROMPT = 400
"""Characters: most of the time is to be decoding."""
_MAX_TOKENS = 64
_WARM_REQUESTS = 8
_SETTLE_SECONDS = 10.0
"""After the start, in which Ray is still busy with itself."""
_CALL_SECONDS = 120.0


def asked(served: Served, prompts: Sequence[str], streams: int, requests: int) -> dict[str, float]:
    """A client's figures of so many requests, and the CPU time of all processes of the server for each token."""
    processes = [served.process, *served.process.children(recursive=True)]
    before = {process: sum(process.cpu_times()[:2]) for process in processes}
    began = time.monotonic()
    client = asyncio.run(_answered(served.url, prompts[:requests], streams))
    seconds = time.monotonic() - began
    if client.failures:
        raise RuntimeError(f"a request failed: {client.failures[0]}")
    used = sum(sum(process.cpu_times()[:2]) - spent for process, spent in before.items())
    return {
        "tokens_per_second": client.tokens / seconds,
        "first_token_seconds": statistics.median(client.first_tokens),
        "server_cpu_ms_per_token": used / client.tokens * 1000,
        "pieces_per_token": (len(client.gaps) + len(client.first_tokens)) / client.tokens,
        "bytes_per_token": client.received_bytes / client.tokens,
    }


async def _answered(url: str, prompts: Sequence[str], count: int) -> Streams:
    async with httpx.AsyncClient(base_url=url, timeout=_CALL_SECONDS, trust_env=False) as http:
        streams = Streams(http, "demo", count, _MAX_TOKENS)
        await streams.answer(prompts)
        return streams


def turn(mode: str, prompts: Sequence[str], sizes: Mapping[int, int]) -> dict[str, Any]:
    """One start of the server; then its figures by number of streams, of so many requests."""
    with ExitStack() as running:
        if mode == BESIDE_RAY:
            folder = running.enter_context(tempfile.TemporaryDirectory(prefix="idle-"))
            running.enter_context(empty_application(Path(folder)))
        served = running.enter_context(serving({}, mode != ON_RAY, lambda line: None))
        found: dict[str, Any] = {"start_seconds": served.seconds}
        time.sleep(_SETTLE_SECONDS)
        asked(served, prompts, 2, _WARM_REQUESTS)
        for streams, requests in sizes.items():
            found[_name(streams)] = asked(served, prompts, streams, requests)
    return found


def _ratios(turns: Sequence[dict[str, dict[str, Any]]], above: str, below: str) -> dict[str, dict[str, float]]:
    """Of one mode to another, by number of streams: medians over turns."""
    names = ("tokens_per_second", "first_token_seconds", "server_cpu_ms_per_token")
    counts = [count for count in turns[0][above] if count != "start_seconds"]
    return {
        count: {
            name: statistics.median(one[above][count][name] / one[below][count][name] for one in turns)
            for name in names
        }
        for count in counts
    }


def _name(streams: int) -> str:
    return f"{streams} streams"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="JSON lines as `spool generate` reads them; else built-in prompts")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64, 96], help="for each number of streams")
    parser.add_argument("--output", type=Path, default=Path("ray_cost.json"))
    arguments = parser.parse_args(argv)
    texts = [prompt.shown for prompt in load_prompts(arguments.prompts, None)]
    short = [text for text in texts if len(text) <= _LONGEST_PROMPT]
    sizes = dict(zip(arguments.streams, arguments.requests, strict=True))
    prompts = list(islice(cycle(short), max(arguments.requests)))
    turns: list[dict[str, dict[str, Any]]] = []
    for number in range(arguments.turns):
        modes = deque((ON_RAY, WITHOUT_RAY, BESIDE_RAY))
        modes.rotate(number)
        turns.append({mode: turn(mode, prompts, sizes) for mode in modes})
        say(f"turn {number + 1}: {json.dumps(_ratios(turns[-1:], ON_RAY, WITHOUT_RAY))}")
    result = {
        "on Ray to without": _ratios(turns, ON_RAY, WITHOUT_RAY),
        "floor: without, beside an idle Ray, to without": _ratios(turns, BESIDE_RAY, WITHOUT_RAY),
        "on Ray to without, beside an idle Ray": _ratios(turns, ON_RAY, BESIDE_RAY),
        "turns": turns,
    }
    write_result(arguments.output, shlex.join(["python", "-m", "bench.ray_cost", *argv]), result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
