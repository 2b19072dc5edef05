"""The other ranks of a worker: child processes that end with it, and it with them.

All processes send each other a byte a second. One that ends, or is silent for long, ends the worker: what it computes
for a step is a part of every row, so that nothing can be saved. Whoever runs the worker starts it again, all of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, NoReturn

from spool.engine.settings import EngineSettings
from spool.services.worker.ending import end_process

logger = logging.getLogger(__name__)

LONGEST_SILENCE_SECONDS = 10.0
"""Of a process that was stopped, or whose machine is stuck. One that computes for long is not silent."""

_BEAT = "."
_BEAT_SECONDS = 1.0


class Gang:
    """Ranks 1 and up of a worker with these settings, of which the process that makes this is rank 0."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._folder = tempfile.TemporaryDirectory(prefix="spool-ranks-", ignore_cleanup_errors=True)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ending = threading.Lock()

    def start(self) -> tuple[Path, Callable[[str], NoReturn]]:
        """Returns at once; as engine/models/loading.py asks for."""
        for rank in range(1, self._settings.tensor_parallel_size):
            started = threading.Event()
            # The process ends with the thread that started it (services/worker/rank.py): one that lasts as long as this
            # process does.
            watcher = threading.Thread(target=self._run, args=(rank, started), name=f"rank-{rank}", daemon=True)
            watcher.start()
            started.wait()
        return Path(self._folder.name), self.end

    def loaded(self) -> None:
        """All ranks have found each other, and rank 0 has its model: the others watch it from now on."""
        self._folder.cleanup()
        for rank, process in self._processes.items():
            beat = threading.Thread(target=keep_beating, args=(_pipe(process.stdin),), name=f"beat-{rank}", daemon=True)
            beat.start()

    def end(self, reason: str) -> NoReturn:
        """Ends this process at once, and the other ranks: they are at different places of a pass, so that no step can
        be answered any more. Does not return."""
        # Whoever comes later waits here for the end.
        self._ending.acquire()
        for process in list(self._processes.values()):
            process.kill()
        self._folder.cleanup()
        end_process(reason)

    def _run(self, rank: int, started: threading.Event) -> None:
        """Starts a rank and watches it until it has ended."""
        try:
            process = self._processes[rank] = self._start(rank)
        except OSError as error:
            started.set()
            self.end(f"rank {rank} cannot be started: {error}")
        started.set()
        reason = watched(_pipe(process.stdout), LONGEST_SILENCE_SECONDS)
        process.kill()
        code = process.wait()
        self.end(f"rank {rank} {reason or _how_ended(code)}")

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        settings = json.dumps(asdict(self._settings))
        arguments = ["--rank", str(rank), "--settings", settings]
        arguments += ["--folder", self._folder.name, "--parent", str(os.getpid())]
        return subprocess.Popen(
            # -P: a folder named `spool` in the current directory, as a clone may be, must not shadow this package.
            [sys.executable, "-P", "-m", "spool.services.worker.rank", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )


def keep_beating(pipe: int) -> None:
    """Tells whoever reads from the pipe every second that this process goes on."""
    with contextlib.suppress(BrokenPipeError):
        while True:
            os.write(pipe, _BEAT.encode())
            time.sleep(_BEAT_SECONDS)


def watched(pipe: int, longest_silence: float) -> str:
    """Reads what a process sends until it ends; the last words that it had, or why it is not to be trusted any more."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    limit: float | None = None  # Until the first sign of life: loading a model takes its time.
    words = ""
    while True:
        if not poll.poll(limit):
            return f"was silent for {longest_silence:g} s"
        sent = os.read(pipe, 4096)
        if not sent:
            return words
        words += sent.decode(errors="replace").strip(_BEAT)
        limit = longest_silence * 1000


def _pipe(stream: IO[bytes] | None) -> int:
    if stream is None:
        raise RuntimeError("the rank was started without a pipe")
    return stream.fileno()


def _how_ended(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"
