"""Releases of Spool side by side: the one before this checkout, unpacked from the history, and the checkout itself."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from spool.protos import scheduler_pb2, scheduler_pb2_grpc
from spool.services.launch.child_process import ChildProcess, Command
from spool.services.launch.process_tuning import compute_environment
from tests.support.waiting import LONG

ROOT = Path(__file__).parents[2]

PREVIOUS_RELEASE = "275c5fd65f5feaa710f6a51a042fbfedfe1fee18"
"""The commit of the last release, whose processes this checkout's work together with. A release sets it to its own."""

NEXT_VERSION = "9999.0"
"""What the checkout's processes say of their version: in a test they are the release that comes next."""

_TASKS = Path(__file__).with_name("release_tasks.py")
_PARTS = ("deploy", "engine", "protos", "scheduler", "services")


@dataclass(frozen=True)
class Release:
    """Sources that processes import as `spool`; what else they need is installed beside the tests."""

    names: Path
    """A folder for Python's path, in which the sources lie under the names that they are installed under."""

    def environment(self, *others: str) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join([str(self.names), *others])}

    def tasks(self, configuration: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
        """Those of the processes of a cell, as this release makes them of a configuration."""
        ended = subprocess.run(
            [sys.executable, "-P", str(_TASKS), str(folder)],
            input=json.dumps(configuration),
            env={**os.environ, **self.environment()},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found: dict[str, dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
        return found


def this_release(folder: Path, version: str = NEXT_VERSION) -> Release:
    """The checkout, as a release with this version. Fingerprints that name it are not those of the one before."""
    release = _named(ROOT, folder)
    metadata = release.names / f"spool_serve-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: spool-serve\nVersion: {version}\n")
    return release


def previous_release(folder: Path) -> Release:
    """Unpacked in the folder. Skips the test, which fails it in CI, where the history does not have the commit."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--format=tar", PREVIOUS_RELEASE], capture_output=True, check=False
    )
    if archive.returncode != 0:
        said = archive.stderr.decode(errors="replace").strip()
        pytest.skip(f"no previous release here, commit {PREVIOUS_RELEASE}, which a full clone has: {said}")
    sources = folder / "sources"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(sources, filter="data")
    return _named(sources, folder)


def _named(sources: Path, folder: Path) -> Release:
    """As `make build/names` names them."""
    names = folder / "names"
    spool = names / "spool"
    spool.mkdir(parents=True)
    for part in _PARTS:
        (spool / part).symlink_to(sources / part)
    (spool / "client").symlink_to(sources / "spool_client")
    return Release(names)


@dataclass
class MixedCell:
    """Processes of several releases that are one cell: all find its scheduler by the same folder."""

    folder: Path
    configuration: Mapping[str, Any]
    worker_environment: Mapping[str, str]
    processes: dict[str, ChildProcess] = field(default_factory=dict)
    _tasks: dict[Path, dict[str, dict[str, Any]]] = field(default_factory=dict)

    async def start(self, release: Release, kind: str, name: str) -> None:
        """A scheduler, gateway, target or draft, which is ready then; a worker once the scheduler uses it."""
        if release.names not in self._tasks:
            self._tasks[release.names] = await asyncio.to_thread(release.tasks, self.configuration, self.folder)
        task = {**self._tasks[release.names][kind], "name": name}
        variables = release.environment()
        if kind in ("target", "draft"):
            variables = compute_environment(1) | self.worker_environment
            variables |= release.environment(self.worker_environment.get("PYTHONPATH", ""))
        # What a parent of the release gives its processes (deploy/processes).
        variables |= {"SPOOL_PROCESS": json.dumps(task), "SPOOL_CHANNEL_SECURITY": "{}"}
        module = "worker" if kind in ("target", "draft") else kind

        def command(port: int) -> Command:
            return Command("spool.deploy.processes", [module, name], variables)

        process = ChildProcess(name, command, self.folder / f"{name}.log", lambda *_: None)
        await process.start(2 * LONG)
        self.processes[name] = process

    async def end(self, name: str) -> str:
        """Asks one process to end, as its parent would while the others stay, and says how it ended."""
        os.kill(self.processes[name].process_id, signal.SIGTERM)
        return await self.ended(name)

    async def ended(self, name: str) -> str:
        """Waits for the end of a process, and says how it ended."""
        ended = await asyncio.wait_for(self.processes[name].wait(), 4 * LONG)
        del self.processes[name]
        return ended

    @asynccontextmanager
    async def scheduler(self) -> AsyncIterator[scheduler_pb2_grpc.SchedulerStub]:
        """The present one."""
        address = (self.folder / "scheduler.address").read_text(encoding="utf-8")
        async with grpc.aio.insecure_channel(address) as channel:
            yield scheduler_pb2_grpc.SchedulerStub(channel)

    async def status(self) -> scheduler_pb2.StatusReply:
        async with self.scheduler() as scheduler:
            return await scheduler.Status(scheduler_pb2.StatusRequest(), timeout=LONG)

    async def drain(self, name: str) -> None:
        """A worker leaves as a replica does: this returns once nothing of it is needed, or the limit has passed."""
        (epoch,) = [one.worker_epoch for one in (await self.status()).workers if one.worker_id == name]
        async with self.scheduler() as scheduler:
            request = scheduler_pb2.DeregisterRequest(worker_id=name, worker_epoch=epoch)
            await scheduler.Deregister(request, timeout=4 * LONG)

    async def close(self) -> None:
        await asyncio.gather(*(process.stop(10) for process in self.processes.values()))
