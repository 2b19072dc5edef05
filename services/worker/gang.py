"""The other ranks of a worker: child processes that end with it, and it with them.

A rank reports as services.worker.rank says. One that ends, or is silent for long, ends the worker: what it computes for
a step is a part of every row, so that nothing can be saved. Whoever runs the worker starts it again, all of it.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from engine.settings import EngineSettings

logger = logging.getLogger(__name__)

# A rank that was stopped, or whose machine is stuck. One that computes for long is not silent.
_LONGEST_SILENCE_SECONDS = 10.0

BEAT = "."
"""What a rank sends every second; anything else is why it ends."""


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
        """All ranks have found each other: removes the folder in which they did."""
        self._folder.cleanup()

    def end(self, reason: str) -> NoReturn:
        """Ends this process at once, and the other ranks: they are at different places of a pass, so that no step can
        be answered any more. Does not return."""
        # Whoever comes later waits here for the end.
        self._ending.acquire()
        for process in list(self._processes.values()):
            process.kill()
        self._folder.cleanup()
        logger.error("the worker ends: %s", reason)
        logging.shutdown()
        os._exit(1)

    def _run(self, rank: int, started: threading.Event) -> None:
        """Starts a rank and watches it until it has ended."""
        try:
            process = self._processes[rank] = self._start(rank)
        except OSError as error:
            started.set()
            self.end(f"rank {rank} cannot be started: {error}")
        started.set()
        reason = watched(process, _LONGEST_SILENCE_SECONDS)
        process.kill()
        code = process.wait()
        self.end(f"rank {rank} {reason or _how_ended(code)}")

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        settings = json.dumps(asdict(self._settings))
        arguments = ["--rank", str(rank), "--settings", settings]
        arguments += ["--folder", self._folder.name, "--parent", str(os.getpid())]
        return subprocess.Popen(
            # -P: a folder named `services` in the current directory must not shadow this package.
            [sys.executable, "-P", "-m", "services.worker.rank", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )


def watched(process: subprocess.Popen[bytes], longest_silence: float) -> str:
    """Reads what a rank sends until that ends; the last words that it had, or why it is not to be trusted any more."""
    if process.stdout is None:
        raise RuntimeError("the rank was started without a pipe")
    pipe = process.stdout.fileno()
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
        words += sent.decode(errors="replace").strip(BEAT)
        limit = longest_silence * 1000


def _how_ended(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"
