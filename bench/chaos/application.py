"""An application under `spool serve`, as seen from outside."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from spool.deploy.cli.status import find_served
from spool.deploy.cluster.served_state import StateFolder
from spool.deploy.errors import RunError

SCHEDULER, TARGET, DRAFT = "Scheduler", "TargetWorker", "DraftWorker"
"""Ray's names of deployments."""

_POLL_SECONDS = 0.05


class ApplicationError(RuntimeError):
    """The application did not recover in time; the message says what was waited for."""


@dataclass(frozen=True)
class Application:
    """`process_id` is the process that its Ray lives in, `environment` that of `spool` commands, `key` an API key."""

    url: str
    grpc_address: str
    model: str
    process_id: int
    environment: Mapping[str, str]
    key: str = "none"

    def status(self) -> dict[str, Any]:
        """What `spool status --json` says."""
        command = [str(Path(sys.executable).with_name("spool")), "status", "--json"]
        ended = subprocess.run(command, env=dict(self.environment), capture_output=True, text=True, check=True)
        status: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
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
        return cls(shape["server_load"], shape["pages_in_use"], ids, busy)

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


def running_application() -> Application:
    """What `spool serve` serves on a Ray of its own on this machine. Raises `RunError` if there is none."""
    served = find_served("spool", StateFolder())
    if served.process_id is None or served.grpc_address is None:
        raise RunError("spool has no gRPC address, or runs on a Ray that `spool serve` did not start")
    return Application(served.http_url, served.grpc_address, served.model, served.process_id, os.environ)
