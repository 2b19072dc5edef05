"""Runs something in a fork of this process, which may loop, hang, crash or take all memory there."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Say = Callable[[str], None]

_IDLE_SECONDS = 20.0
"""A fork all of whose threads sleep for so long, without a tick of processor time, hangs."""
_MORE_MEMORY = 3 * 2**30


@dataclass(frozen=True, slots=True)
class ForkReport:
    """What a fork said, line by line, and how it ended: "done", "time", "hang" or "crash"."""

    said: list[str]
    end: str


def limit_processor_time(seconds: float) -> None:
    """This process ends with SIGPROF when it has used so much more."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def in_fork(work: Callable[[Say], None]) -> ForkReport:
    """`work` gets a function by which it says a line. It ends with the process, whose output is lost."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_child(work, writing)
    os.close(writing)
    said, hangs = _listen(child, reading)
    os.close(reading)
    if hangs:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if hangs:
        end = "hang"
    elif os.WIFSIGNALED(status):
        end = "time" if os.WTERMSIG(status) == signal.SIGPROF else "crash"
    else:
        end = "done" if os.WEXITSTATUS(status) == 0 else "crash"
    return ForkReport(said.decode().splitlines(), end)


def _be_child(work: Callable[[Say], None], writing: int) -> None:
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        memory = pages * resource.getpagesize() + _MORE_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        with open(writing, "w", encoding="utf-8", buffering=1) as pipe:
            work(lambda line: print(line, file=pipe))
        code = 0
    finally:
        os._exit(code)


def _listen(child: int, reading: int) -> tuple[bytes, bool]:
    """All that it says, and whether it hangs."""
    said = b""
    ticks, since = -1, time.monotonic()
    while True:
        if select.select([reading], [], [], 1.0)[0]:
            part = os.read(reading, 65536)
            if not part:
                return said, False
            said += part
            since = time.monotonic()
            continue
        now, sleeps = _ticks(child)
        if not sleeps or now != ticks:
            ticks, since = now, time.monotonic()
        elif time.monotonic() - since > _IDLE_SECONDS:
            return said, True


def _ticks(child: int) -> tuple[int, bool]:
    """Processor time of all threads, and whether all of them sleep."""
    ticks, sleeps = 0, True
    for task in Path(f"/proc/{child}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            fields = (task / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            sleeps = sleeps and fields[0] in "SZ"
    return ticks, sleeps
