"""What Ray costs: the demo served on Ray and without it, in turns, asked by one client over HTTP.

    python -m bench.ray_cost --prompts FILE --output ray_cost.json

Both servers are up all the time, and the processes of the one that is not asked are stopped, so turns are short and a
machine that others share slows both alike. In a third mode Ray goes on while plain processes are asked: this is the
floor, what Ray takes even if nobody uses it.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx

from bench.record import write_result
from bench.served import Served, serving
from bench.strangers.honest import Streams
from spool.deploy.offline.prompts import load_prompts
from spool.deploy.progress import say

ON_RAY, WITHOUT_RAY, BESIDE_RAY = "on Ray", "without Ray", "without Ray, beside an idle one"

_LONGEST_PROMPT = 400
"""Characters: most of the time is to be decoding."""
_MAX_TOKENS = 64
_WARM_REQUESTS = 8
_SETTLE_SECONDS = 15.0
"""After the start, in which Ray is still busy with itself."""
_CALL_SECONDS = 120.0
_OTHER_PORTS = {"gateway": {"port": 8100, "grpc_port": 8101}}

Figures = dict[str, float]


def asked(served: Served, prompts: Sequence[str], streams: int) -> Figures:
    """A client's figures, one request for each prompt, and the CPU time of all of the server's processes."""
    processes = [served.process, *served.process.children(recursive=True)]
    before = {process: sum(process.cpu_times()[:2]) for process in processes}
    began = time.monotonic()
    client = asyncio.run(_answered(served.url, prompts, streams))
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


@contextmanager
def _stopped(served: Served) -> Iterator[None]:
    """None of the server's processes runs in the block."""
    processes = [served.process, *served.process.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in reversed(processes):
            process.resume()


def turn(
    number: int, on_ray: Served, without: Served, prompts: Sequence[str], sizes: Mapping[int, int]
) -> dict[str, dict[str, Figures]]:
    """By number of streams and mode; the modes take turns in coming first."""
    found: dict[str, dict[str, Figures]] = {}
    for streams, requests in sizes.items():
        modes = deque((ON_RAY, WITHOUT_RAY, BESIDE_RAY))
        modes.rotate(number)
        own = found[f"{streams} streams"] = {}
        for mode in modes:
            if mode == ON_RAY:
                with _stopped(without):
                    own[mode] = asked(on_ray, prompts[:requests], streams)
            elif mode == WITHOUT_RAY:
                with _stopped(on_ray):
                    own[mode] = asked(without, prompts[:requests], streams)
            else:
                own[mode] = asked(without, prompts[:requests], streams)
    return found


def _ratios(turns: Sequence[dict[str, dict[str, Figures]]], above: str, below: str) -> dict[str, Figures]:
    """Of one mode to another, by number of streams: medians over turns."""
    names = ("tokens_per_second", "first_token_seconds", "server_cpu_ms_per_token")
    return {
        streams: {
            name: statistics.median(one[streams][above][name] / one[streams][below][name] for one in turns)
            for name in names
        }
        for streams in turns[0]
    }


def _shown(one: dict[str, dict[str, Figures]]) -> str:
    return "; ".join(
        f"{streams}: " + ", ".join(f"{mode} {figures['tokens_per_second']:.1f}" for mode, figures in found.items())
        for streams, found in one.items()
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="JSON lines as `spool generate` reads them; else built-in prompts")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--requests", type=int, nargs="+", default=[12, 40, 64], help="for each number of streams")
    parser.add_argument("--output", type=Path, default=Path("ray_cost.json"))
    arguments = parser.parse_args(argv)
    texts = [prompt.shown for prompt in load_prompts(arguments.prompts, None)]
    short = [text for text in texts if len(text) <= _LONGEST_PROMPT]
    sizes = dict(zip(arguments.streams, arguments.requests, strict=True))
    prompts = list(islice(cycle(short), max(arguments.requests)))
    turns: list[dict[str, dict[str, Figures]]] = []
    with serving({}, False, lambda line: None) as on_ray, serving(_OTHER_PORTS, True, lambda line: None) as without:
        time.sleep(_SETTLE_SECONDS)
        for served in (on_ray, without):
            asked(served, prompts[:_WARM_REQUESTS], 2)
        for number in range(arguments.turns):
            turns.append(turn(number, on_ray, without, prompts, sizes))
            say(f"turn {number + 1}: {_shown(turns[-1])}")
    result: dict[str, Any] = {
        "on Ray to without": _ratios(turns, ON_RAY, WITHOUT_RAY),
        "floor: without, beside an idle Ray, to without": _ratios(turns, BESIDE_RAY, WITHOUT_RAY),
        "on Ray to without, beside an idle Ray": _ratios(turns, ON_RAY, BESIDE_RAY),
        "turns": turns,
    }
    write_result(arguments.output, shlex.join(["python", "-m", "bench.ray_cost", *argv]), result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
