"""An application under `spool serve` for a measurement, and what can be seen of it from outside."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

SCHEDULER, TARGET, DRAFT, GATEWAY = DEPLOYMENTS = ("Scheduler", "TargetWorker", "DraftWorker", "Gateway")

_POLL_SECONDS = 0.05
_START_SECONDS = 900.0
_START_ATTEMPTS = 3


class ApplicationError(RuntimeError):
    """The application did not start, stop or recover; the message says what was waited for."""


@dataclass(frozen=True)
class Application:
    """Where it listens, the process that its Ray lives in, and the environment of `spool` commands about it.

    `key` is what clients show.
    """

    url: str
    grpc_address: str
    model: str
    process_id: int
    environment: Mapping[str, str]
    key: str = "none"

    def status(self) -> dict[str, Any]:
        """What `spool status --json` says."""
        status: dict[str, Any] = json.loads(_spool(["status", "--json"], self.environment).splitlines()[-1])
        return status

    def workers_lost(self) -> int:
        """Times that the present scheduler has lost a worker."""
        return int(self.status()["cells"][0]["throughput"]["workers_lost"])

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """Live replicas of a deployment, which Ray names after it; the oldest first."""
        found = []
        for process in psutil.Process(self.process_id).children(recursive=True):
            try:
                command = " ".join(process.cmdline())
                if f"ServeReplica:spool:{deployment}" in command and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return sorted(found, key=lambda process: process.create_time())


@dataclass(frozen=True)
class LoadReport:
    """What `/load` says. `workers` are the ids of those in use, by role; `busy_targets` those with sequences."""

    sequences: int
    waiting: int
    pages_in_use: int
    workers: Mapping[str, frozenset[str]]
    busy_targets: frozenset[str]

    @classmethod
    def from_json(cls, shape: Mapping[str, Any]) -> Self:
        workers = shape["workers"]
        ids = {
            role: frozenset(worker["worker_id"] for worker in workers if worker["role"] == role)
            for role in ("target", "draft")
        }
        busy = frozenset(worker["worker_id"] for worker in workers if worker["sequences"]) & ids["target"]
        return cls(shape["server_load"], shape["waiting"], shape["pages_in_use"], ids, busy)

    @property
    def idle(self) -> bool:
        return not self.sequences and not self.pages_in_use


class Watcher:
    """Asks an application for its load until something holds."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def load(self) -> LoadReport | None:
        """None where there is no scheduler to ask."""
        try:
            response = await self._http.get("/load")
        except httpx.TransportError:
            return None
        return LoadReport.from_json(response.json()) if response.is_success else None

    async def until(self, holds: Callable[[LoadReport], bool], what: str, seconds: float) -> LoadReport:
        """Raises ApplicationError where `what` does not come in time."""
        end = time.monotonic() + seconds
        while True:
            report = await self.load()
            if report is not None and holds(report):
                return report
            if time.monotonic() > end:
                raise ApplicationError(f"{what}: not within {seconds:g} s, the last that was seen: {report}")
            await asyncio.sleep(_POLL_SECONDS)


@asynccontextmanager
async def watching(application: Application) -> AsyncIterator[Watcher]:
    headers = {"authorization": f"Bearer {application.key}"}
    async with httpx.AsyncClient(base_url=application.url, headers=headers, timeout=10) as http:
        yield Watcher(http)


@contextmanager
def served(config: Path | None, overrides: Sequence[str]) -> Iterator[Application]:
    """Serves on a Ray of its own, on free ports, and stops it at the end. Raises ApplicationError."""
    http_port, grpc_port = _free_ports(2)
    # Not deep: the paths of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="spool-", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "SPOOL_STATE": folder, "HF_HUB_OFFLINE": "1"}
        ports = [f"gateway.port={http_port}", f"gateway.grpc_port={grpc_port}", f"ray.folder={folder}/ray"]
        options = [word for override in (*overrides, *ports) for word in ("--set", override)]
        if config is not None:
            options += ["--config", str(config)]
        try:
            _start(options, environment)
            state = json.loads((Path(folder) / "spool.json").read_text(encoding="utf-8"))
            yield Application(
                state["http_url"], state["grpc_address"], state["model"], state["process_id"], environment
            )
        finally:
            _spool(["down"], environment)


def _start(options: Sequence[str], environment: Mapping[str, str]) -> None:
    for attempt in range(_START_ATTEMPTS):
        try:
            _spool(["serve", "--detach", *options], environment)
            return
        except ApplicationError as error:
            # Ray gives its own processes 30 s to start, which a busy machine may exceed.
            if "Ray did not start" not in str(error) or attempt == _START_ATTEMPTS - 1:
                raise


def _spool(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    command = [str(Path(sys.executable).with_name("spool")), *arguments]
    try:
        ended = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_START_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ApplicationError(f"spool {arguments[0]} took longer than {_START_SECONDS:g} s") from error
    if ended.returncode != 0:
        raise ApplicationError(f"spool {arguments[0]} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return ended.stdout


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
