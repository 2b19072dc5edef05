"""Requests cancelled at random moments, over HTTP and gRPC; then how long until nothing of them is left. JSON last.

Exit code 1 if after `--patience` seconds the scheduler still reports a live sequence or a page in use.

    python -m bench.cancel_storm --url http://127.0.0.1:8000 --grpc 127.0.0.1:8001
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter

import grpc
import httpx

from spool_client.v1 import generation_pb2, generation_pb2_grpc

_POLL_SECONDS = 0.02


class Storm:
    def __init__(self, http: httpx.AsyncClient, stub: generation_pb2_grpc.GenerationServiceStub, at_once: int) -> None:
        self._http = http
        self._stub = stub
        self._slots = asyncio.Semaphore(at_once)
        self.outcomes: Counter[str] = Counter()

    async def request(self, index: int, patience: float) -> None:
        """One request that is cancelled `patience` seconds after it was sent, wherever it is by then."""
        async with self._slots:
            send = self._over_http if index % 2 else self._over_grpc
            name = send.__name__.strip("_")
            try:
                async with asyncio.timeout(patience):
                    await send(index)
                self.outcomes[f"{name}: finished first"] += 1
            except TimeoutError:
                self.outcomes[f"{name}: cancelled"] += 1

    async def _over_http(self, index: int) -> None:
        body = {"prompt": f"Once upon a time, {index}", "max_tokens": 200, "stream": True, "seed": index}
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.aiter_bytes():
                pass

    async def _over_grpc(self, index: int) -> None:
        call = self._stub.GenerateStream(
            generation_pb2.GenerateRequest(text=f"Once upon a time, {index}", max_tokens=200, seed=index)
        )
        try:
            async for _ in call:
                pass
        finally:
            call.cancel()


async def seconds_until_idle(http: httpx.AsyncClient, limit: float) -> tuple[float, dict[str, object]]:
    started = time.monotonic()
    while True:
        load = (await http.get("/load")).raise_for_status().json()
        waited = time.monotonic() - started
        busy = load["server_load"] or load["pages_in_use"]
        if not busy or waited > limit:
            return waited, load
        await asyncio.sleep(_POLL_SECONDS)


async def main(arguments: argparse.Namespace) -> int:
    rng = random.Random(arguments.seed)
    headers = {"Authorization": f"Bearer {arguments.key}"}
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=arguments.url, headers=headers, timeout=600, limits=limits) as http,
        grpc.aio.insecure_channel(arguments.grpc) as channel,
    ):
        storm = Storm(http, generation_pb2_grpc.GenerationServiceStub(channel), arguments.at_once)
        patience = [rng.uniform(0, arguments.longest) for _ in range(arguments.requests)]
        await asyncio.gather(*(storm.request(index, seconds) for index, seconds in enumerate(patience)))
        waited, load = await seconds_until_idle(http, limit=30)
    result = {"requests": arguments.requests, "outcomes": storm.outcomes, "seconds_until_idle": waited, "load": load}
    print(json.dumps(result))
    return 0 if waited <= arguments.patience else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    parser.add_argument("--key", default="none")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--longest", type=float, default=4.0, help="seconds after which the last request is cancelled")
    parser.add_argument("--patience", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(asyncio.run(main(parser.parse_args())))
