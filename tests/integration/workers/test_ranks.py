"""A worker of several ranks ends as one, whichever of them is killed or stopped, and leaves no process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spool.scheduler.messages import Role
from spool.services.launch.launcher import WorkerLaunch, WorkerLauncher
from spool.services.worker.gang import watched
from tests.support.tiny_models import save_tiny_pair
from tests.support.waiting import LONG, until

# What a worker does with its ranks before any of them has loaded its model.
RANK_ZERO = """
import time
from spool.engine.settings import EngineSettings
from spool.services.worker.gang import Gang
Gang(EngineSettings("m", tensor_parallel_size=3)).start()
print("started", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", RANK_ZERO], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        yield process
        process.kill()


def ranks_of(worker: subprocess.Popen[bytes]) -> list[psutil.Process]:
    ranks = psutil.Process(worker.pid).children()
    # A process that has just begun shows no command for a moment.
    asyncio.run(until(lambda: ["--rank" in rank.cmdline() for rank in ranks] == [True, True]))
    return ranks


def loads_torch(process: psutil.Process) -> bool:
    return any("torch" in mapped.path for mapped in process.memory_maps())


def test_the_worker_ends_with_each_of_its_ranks(worker: subprocess.Popen[bytes], tmp_path: Path) -> None:
    first, second = ranks_of(worker)
    first.suspend()
    second.kill()
    _, told = worker.communicate(timeout=LONG)
    assert worker.returncode == 1
    assert b"rank 2 was killed by signal 9" in told
    assert psutil.wait_procs([first, second], timeout=LONG)[1] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_worker_even_if_they_are_stopped(worker: subprocess.Popen[bytes], number: int) -> None:
    first, second = ranks_of(worker)
    asyncio.run(until(lambda: loads_torch(first)))  # before that, a rank asks the system to end it with its parent
    first.suspend()
    worker.send_signal(number)
    assert psutil.wait_procs([first, second], timeout=LONG)[1] == []


@pytest.mark.long
async def test_worker_processes_end_together_when_rank_zero_is_stopped(tmp_path: Path) -> None:
    folder, _ = save_tiny_pair("llama", tmp_path)
    settings = {"model": str(folder), "dtype": "float32", "exact": False, "kv_pages": 9, "tensor_parallel_size": 2}
    launch = WorkerLaunch(Role.TARGET, settings, threads=1)
    ended: list[str] = []
    async with WorkerLauncher([launch], on_exit=lambda _, reason: ended.append(reason)) as launcher:
        (worker,) = launcher.workers
        (rank,) = psutil.Process(worker.process_id).children()
        os.kill(worker.process_id, signal.SIGSTOP)
        await until(lambda: bool(ended))
        assert "signal 9" in ended[0]
        assert "rank 0 was silent for 10 s" in launcher.log_path(worker.worker_id).read_text()
    assert psutil.wait_procs([rank], timeout=LONG)[1] == []


def test_a_silent_process_is_not_trusted() -> None:
    with subprocess.Popen(["sh", "-c", "printf .; exec sleep 1000"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert watched(process.stdout.fileno(), 0.1) == "was silent for 0.1 s"
        process.kill()


def test_a_rank_says_why_it_ends() -> None:
    with subprocess.Popen(["sh", "-c", "printf ...; printf 'failed: no memory'"], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        assert watched(rank.stdout.fileno(), LONG) == "failed: no memory"
