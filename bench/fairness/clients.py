"""The clients of `python -m bench.fairness`, in processes of their own, so that they delay nothing that is measured.

    python -m bench.fairness.clients single URL --requests 100 --prompt 600 --output 8
    python -m bench.fairness.clients flood URL --streams 200 --prompt 600 --output 100

The first asks once a second, and prints the seconds to each first token as JSON. The second keeps its streams open
until its standard input ends; it prints a line when each of them has been sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence

import httpx

INTERVAL = 1.0
_TIMEOUT = 600.0
_SENTENCE = "Once upon a time there was a key that asked seldom. "


async def pieces(http: httpx.AsyncClient, key: str, name: str, prompt: int, output: int) -> AsyncIterator[None]:
    """Streams a completion of `prompt` bytes that begin with the name. Raises httpx.HTTPError, also for an error in the
    stream."""
    text = f"{name}) {_SENTENCE * (prompt // len(_SENTENCE) + 1)}"[:prompt]
    # Special tokens have a text here, so that no token is without one.
    body = {"prompt": text, "max_tokens": output, "stream": True, "ignore_eos": True, "temperature": 0}
    headers = {"authorization": f"Bearer {key}"}
    body["skip_special_tokens"] = False
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for chunk in response.aiter_bytes():
            if b'"error"' in chunk:
                raise httpx.StreamError(chunk.decode(errors="replace"))
            if b"data: {" in chunk:
                yield


async def first_token(http: httpx.AsyncClient, arguments: argparse.Namespace, name: str) -> float:
    """Seconds from a request to its first token."""
    began, first = time.perf_counter(), None
    async for _ in pieces(http, arguments.key, name, arguments.prompt, arguments.output):
        first = first or time.perf_counter()
    if first is None:
        raise httpx.StreamError(f"request {name} ended without a token")
    return first - began


async def ask_once_a_second(http: httpx.AsyncClient, arguments: argparse.Namespace) -> None:
    """Requests are sent whatever became of those before."""
    await first_token(http, arguments, f"{arguments.name} first")  # makes connections and kernels
    asks, begin = [], time.monotonic()
    for number in range(arguments.requests):
        await asyncio.sleep(max(begin + number * INTERVAL - time.monotonic(), 0.0))
        asks.append(asyncio.create_task(first_token(http, arguments, f"{arguments.name} {number}")))
    print(json.dumps(await asyncio.gather(*asks)), flush=True)


async def flood(http: httpx.AsyncClient, arguments: argparse.Namespace) -> None:
    async def stream(number: int) -> None:
        while True:
            async for _ in pieces(http, arguments.key, f"flood {number}", arguments.prompt, arguments.output):
                pass
            number += arguments.streams

    streams = [asyncio.create_task(stream(number)) for number in range(arguments.streams)]
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    print("flooding", flush=True)
    await asyncio.wait([ended, *streams], return_when=asyncio.FIRST_COMPLETED)
    for one in streams:
        one.cancel()
    failures = [end for end in await asyncio.gather(*streams, return_exceptions=True) if isinstance(end, Exception)]
    if failures:
        raise failures[0]


async def run(arguments: argparse.Namespace) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=arguments.url, timeout=_TIMEOUT, limits=limits) as http:
        await (ask_once_a_second if arguments.load == "single" else flood)(http, arguments)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", choices=("single", "flood"))
    parser.add_argument("url")
    parser.add_argument("--key", required=True)
    parser.add_argument("--prompt", type=int, required=True, help="bytes")
    parser.add_argument("--output", type=int, required=True, help="tokens")
    parser.add_argument("--name", default="", help="how prompts begin, so that none begins as one of another run")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--streams", type=int, default=200)
    asyncio.run(run(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
