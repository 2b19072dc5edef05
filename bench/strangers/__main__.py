"""Serves the demo, lets eight kinds of attackers at it, and measures what an honest client with a key of its own gets.

    python -m bench.strangers --no-ray --output bench/results/strangers.json

After the attack, a well-behaved client with the attackers' key keeps as many sequences running as they did, for the
honest client's comparison. The exit code is 1 if a request of the honest client failed, or a line of the result's
`limits` does not hold. Attackers use at most `--share` of a core together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.record import write_result
from bench.served import serving
from bench.strangers.attackers import Victim, attack
from bench.strangers.honest import Streams
from spool.deploy.progress import say
from spool.services.gateway.settings import ConnectionLimits

_HONEST_STREAMS = 2
_RECEIPTS = 32
_TIMES = 3.0
_GATEWAY_BYTES = 600e6
_LOG_BYTES = 10e6
_DESCRIPTORS = ConnectionLimits().total + 64


class Server:
    """What `spool serve` runs on this machine, and what its gateways use."""

    def __init__(self, victim: Victim, honest_key: str, log_folder: Path) -> None:
        self.victim = victim
        self.honest_key = honest_key
        self._log_folder = log_folder
        listening = [one for one in psutil.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        self._gateways = {one.pid for one in listening if one.laddr and one.laddr.port == victim.port}

    def log_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._log_folder.rglob("*") if path.is_file())

    def usage(self) -> tuple[int, int]:
        """Resident bytes and descriptors of the gateway that has most."""
        processes = [psutil.Process(number) for number in self._gateways]
        return max(one.memory_info().rss for one in processes), max(one.num_fds() for one in processes)


@contextmanager
def attackable(without_ray: bool, port: int) -> Iterator[Server]:
    """The demo, served with two keys and a key for receipts."""
    key = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with tempfile.NamedTemporaryFile(suffix=".pem") as receipts:
        receipts.write(key)
        receipts.flush()
        honest, attacker = secrets.token_hex(16), secrets.token_hex(16)
        settings = {
            "gateway": {"port": port, "grpc_port": port + 1, "receipt_key_file": receipts.name},
            "auth": {"api_keys": [honest, attacker]},
        }
        with serving(settings, without_ray, say) as served:
            victim = Victim("127.0.0.1", port, f"127.0.0.1:{port + 1}", "demo", attacker)
            yield Server(victim, honest, served.log_folder)


@asynccontextmanager
async def _calling(victim: Victim, key: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=victim.url, headers=headers, timeout=120, limits=httpx.Limits(max_connections=None)
    ) as http:
        yield http


async def _receipts(victim: Victim) -> list[str]:
    async with _calling(victim, victim.key) as http:
        body = {"model": victim.model, "prompt": "Rivers run", "max_tokens": 64, "receipt": True, "n": _RECEIPTS}
        answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
        return [json.dumps(choice["receipt"]) for choice in answer["choices"]]


async def _watched(server: Server, seconds: float, others: Streams | None) -> dict[str, Any]:
    """The honest client's figures beside `others`, if any, and what was seen of the server meanwhile."""
    running, resident, descriptors = [], 0, 0
    async with _calling(server.victim, server.honest_key) as http:
        honest = Streams(http, server.victim.model, _HONEST_STREAMS, 24)
        tasks = [asyncio.create_task(honest.run())]
        if others is not None:
            tasks.append(asyncio.create_task(others.run()))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(1.0)
            used = server.usage()
            resident, descriptors = max(resident, used[0]), max(descriptors, used[1])
            load = await http.get("/load")
            if load.is_success:
                running.append(load.json()["running"])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return honest.figures() | {
        "running": sum(running) / max(1, len(running)),
        "gateway_bytes": resident,
        "gateway_descriptors": descriptors,
    }


async def measure(server: Server, seconds: float, beside_seconds: float, share: float) -> dict[str, Any]:
    receipts = await _receipts(server.victim)
    logged = server.log_bytes()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    attackers = context.Process(target=attack, args=(server.victim, share, receipts, seconds, answers))
    attackers.start()
    # What it takes to get ready is not of the attack, neither the time nor what the machine does in it.
    await asyncio.to_thread(answers.get)
    say(f"attacking for {seconds:g} s")
    attacked = await _watched(server, seconds, None)
    counts = await asyncio.to_thread(answers.get)
    attackers.join()
    say(f"attacked: {json.dumps(attacked)}; answers: {json.dumps(counts)}")
    attacked["log_bytes"] = server.log_bytes() - logged
    beside = max(1, round(attacked["running"]) - _HONEST_STREAMS)
    async with _calling(server.victim, server.victim.key) as http:
        well_behaved = Streams(http, server.victim.model, beside, 400)
        say(f"comparing for {beside_seconds:g} s with a client that keeps {beside} sequences running")
        compared = await _watched(server, beside_seconds, well_behaved)
    return {"attacked": attacked, "answers": counts, "beside_well_behaved": compared} | {
        "limits": _limits(attacked, compared)
    }


def _limits(attacked: dict[str, Any], compared: dict[str, Any]) -> dict[str, bool]:
    def times(name: str) -> float:
        ratio: float = attacked[name]["p99"] / compared[name]["p99"]
        return ratio if math.isfinite(ratio) else math.inf

    return {
        "no request failed": not attacked["failures"],
        f"first token's p99 at most {_TIMES:g} times: {times('first_token'):.2f}": times("first_token") <= _TIMES,
        f"gap's p99 at most {_TIMES:g} times: {times('gap'):.2f}": times("gap") <= _TIMES,
        f"gateway below {_GATEWAY_BYTES / 1e6:g} MB": attacked["gateway_bytes"] < _GATEWAY_BYTES,
        f"at most {_DESCRIPTORS} descriptors": attacked["gateway_descriptors"] <= _DESCRIPTORS,
        f"log at most {_LOG_BYTES / 1e6:g} MB": attacked["log_bytes"] <= _LOG_BYTES,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-ray", action="store_true", help="serve as plain processes")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the attack")
    parser.add_argument("--beside-seconds", type=float, default=120.0, help="of the comparison")
    parser.add_argument("--share", type=float, default=0.2, help="of a core that attackers use together")
    parser.add_argument("--port", type=int, default=8100, help="of HTTP; gRPC has the next one")
    parser.add_argument("--output", type=Path, default=Path("strangers.json"))
    arguments = parser.parse_args(argv)
    with attackable(arguments.no_ray, arguments.port) as server:
        result = asyncio.run(measure(server, arguments.seconds, arguments.beside_seconds, arguments.share))
    write_result(arguments.output, shlex.join(["python", "-m", "bench.strangers", *argv]), result)
    print(json.dumps(result, indent=2))
    return 0 if all(result["limits"].values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
