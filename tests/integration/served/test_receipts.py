"""Receipts of answers amid which a target and the scheduler are killed, computed again by `spool replay`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import httpx
import psutil
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from services.receipts.signing import ReceiptKey
from tests.support.chat_templates import HERMES
from tests.support.command_line import spool, started, write_lines
from tests.support.ports import free_ports
from tests.support.serving import ENGINE, PACED
from tests.support.waiting import LONG, wait_until

pytestmark = pytest.mark.slow

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
COMMON: dict[str, Any] = {"receipt": True, "max_tokens": 60}
ENDED = {"max_tokens": 70, "stop_token_ids": [95]}
ASKED: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "temperature": 0, **COMMON},
    {"prompt": "Once upon a hill", "temperature": 0.7, "seed": 3, "n": 2, **COMMON},
    {"prompt": "The end of", "temperature": 1.2, "top_p": 0.9, "top_k": 30, "spool": {"speculation": False}, **COMMON},
    {"prompt": "a b a b a b", "temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.2, **COMMON},
    {"prompt": "a b a b a b", "temperature": 0.5, "logit_bias": {"5": 4, "9": -100}, "min_p": 0.02, **COMMON},
    {"prompt": "A number: ", "structured_outputs": {"regex": "([0-9]{1,3},){12,20}"}, "temperature": 0.9, **ENDED},
    {"messages": [{"role": "user", "content": "Look!"}], "temperature": 0.3, "stop": "q", **COMMON},
    {"messages": [{"role": "user", "content": "Look!"}], "tools": [TOOL], "tool_choice": "required", **ENDED},
]


class Server:
    def __init__(self, process: Popen[str], target: Path, url: str, public_key: str) -> None:
        self._process = psutil.Process(process.pid)
        self._told: list[str] = []
        threading.Thread(target=lambda: self._told.extend(process.stderr or ()), daemon=True).start()
        self._starts = Counter(("scheduler", "gateway-0", "target-0", "target-1", "draft-0"))
        self.target = target
        self.url = url
        self.public_key = public_key

    def kill(self, names: list[str]) -> None:
        found = [child.pid for child in self._process.children() if child.cmdline()[-1] in names]
        assert len(found) == len(names)
        for process_id in found:
            os.kill(process_id, signal.SIGKILL)
        self._starts.update(names)

    def wait_until_up(self) -> None:
        """All processes, those that were killed again. One that dies before it is up ends all."""

        def up() -> bool:
            return all(self._told.count(f"{name}: up\n") == starts for name, starts in self._starts.items())

        wait_until(up, f"all are up in {self._told}", 4 * LONG)


@pytest.fixture(scope="module")
def served(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("receipts")
    key = folder / "key.pem"
    private = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    key.write_bytes(private)
    target = shutil.copytree(tiny_pair[0], folder / "target")
    (target / "chat_template.jinja").write_text(HERMES)
    port, grpc_port = free_ports(2)
    gateway = {"receipts": True, "receipt_key_file": str(key)}
    groups = {"target": PACED | {"replicas": 2}}
    settings = {"engine": ENGINE, "groups": groups, "gateway": gateway, "metrics": {"scheduler_address": None}}
    (folder / "spool.yaml").write_text(yaml.safe_dump(settings))
    command = ["serve", target, "--draft", tiny_pair[1], "--no-ray", "--threads", 1]
    command += ["--port", port, "--grpc-port", grpc_port]
    with started(*command, cwd=folder, environment={"SPOOL_STATE": str(folder / "state")}) as process:
        server = Server(process, target, f"http://127.0.0.1:{port}", ReceiptKey(private.decode()).public)
        yield server
        process.send_signal(signal.SIGTERM)
        process.wait(LONG)


async def ask(client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Queue[None]) -> list[str]:
    """The receipts of a stream, as lines of JSON lines; tells when the stream has tokens."""
    route = "chat/completions" if "messages" in body else "completions"
    found: list[str] = []
    told = False
    async with client.stream("POST", f"/v1/{route}", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            assert '"error"' not in line, line
            if not told and line.startswith("data: ") and '"role":' not in line:
                told = True
                begun.put_nowait(None)
            if '"receipt":' in line:
                found.append(line.removeprefix("data: "))
    return found


async def ask_all(server: Server, kills: list[str]) -> list[str]:
    begun: asyncio.Queue[None] = asyncio.Queue()
    async with httpx.AsyncClient(base_url=server.url, timeout=4 * LONG) as client:
        answers = [asyncio.create_task(ask(client, body, begun)) for body in ASKED]
        for _ in range(4):
            await begun.get()
        server.kill(kills)
        return [receipt for answer in await asyncio.gather(*answers) for receipt in answer]


@pytest.mark.parametrize("kills", [["target-0"], ["scheduler"], ["target-1", "scheduler"]], ids=str)
def test_killed_processes_leave_no_mark_on_receipts(kills: list[str], served: Server, tmp_path: Path) -> None:
    served.wait_until_up()
    lines = asyncio.run(ask_all(served, kills))
    assert len(lines) == len(ASKED) + 1
    file = write_lines(tmp_path / "receipts.jsonl", *lines)
    ended = spool("replay", file, "--target", served.target, "--public-key", served.public_key, "--json")
    assert ended.code == 0, ended.err
    assert ended.summary["tokens"] > 5 * COMMON["max_tokens"]
