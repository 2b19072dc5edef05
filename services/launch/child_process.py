"""Child processes of Spool: started, heard while they load, watched, restarted and stopped by their parent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from spool.engine.errors import with_remedy
from spool.scheduler.errors import SpoolError
from spool.services.rpc.backoff import Backoff

_LONGEST_PAUSE_SECONDS = 30.0
_STOP_SECONDS = 10.0
# From its end: the last line says why a process did not start.
_READ_OF_LOG = 65536

Progress = Callable[[str, str, float | None], None]
"""Receives the name of a process, what it does, and the fraction that is done (None: not known)."""


class ProcessStartError(SpoolError, RuntimeError):
    """A process did not become ready; the message is one line with the process's own reason."""


@dataclass(frozen=True, slots=True)
class Command:
    """`python -m module arguments`. Secrets go to `variables`: every user of the machine can read command lines."""

    module: str
    arguments: Sequence[str]
    variables: Mapping[str, str]


class ChildProcess:
    """One process, which can be started again on the same port after it has died.

    `command` gives the command line for a port (0: any free one). The process reports events as
    `spool.services.worker.process` does, and stops when its standard input ends, so it never outlives its parent. Its
    standard error goes to `log_path`.
    """

    def __init__(self, name: str, command: Callable[[int], Command], log_path: Path, on_loading: Progress) -> None:
        self.name = name
        self.log_path = log_path
        self.address = ""
        self._command = command
        self._on_loading = on_loading
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process_id(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self, timeout_seconds: float) -> None:
        """Returns once the process is ready. Raises ProcessStartError, and leaves no process behind then."""
        self._on_loading(self.name, "starting", None)
        try:
            async with asyncio.timeout(timeout_seconds):
                self._process = await self._spawn()
                await self._until_ready(self._process)
        except BaseException as error:
            await self.stop(0)
            if isinstance(error, TimeoutError):
                raise ProcessStartError(f"{self.name}: not ready after {timeout_seconds:g} s") from None
            raise

    async def wait(self) -> str:
        """Waits for the end of a process that was started and says how it ended."""
        if self._process is None or self._process.stdout is None:
            raise RuntimeError(f"{self.name} was never started")
        # A process prints no events after "ready". Reading to the end keeps the pipe from filling up if one does.
        await self._process.stdout.read()
        code = await self._process.wait()
        return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"

    async def stop(self, timeout_seconds: float) -> None:
        """SIGTERM, and SIGKILL if the process is still there after the time given. Its standard input ends before, by
        which it knows that its parent and not somebody else stops it."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            if process.stdin is not None:
                process.stdin.close()
                with contextlib.suppress(ConnectionError):
                    await process.stdin.wait_closed()
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                process.terminate()
                await asyncio.wait_for(process.wait(), timeout_seconds)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        await process.wait()

    async def _spawn(self) -> asyncio.subprocess.Process:
        command = self._command(int(self.address.rpartition(":")[2] or 0))
        with self.log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                # -P: a folder in the current directory must not shadow a package of Spool.
                *(sys.executable, "-P", "-m", command.module, *command.arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **command.variables},
                # Ctrl-C goes to the whole foreground group; the parent alone decides when its children stop. Not a
                # session of its own: Linux can share cores equally among sessions (autogroup), and the many threads of
                # a worker would together get as much as one of a gateway.
                process_group=0,
            )

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        while process.stdout is not None and (line := await process.stdout.readline()):
            match json.loads(line):
                case {"event": "loading", "message": message, "fraction": fraction}:
                    self._on_loading(self.name, message, fraction)
                case {"event": "ready", "address": address}:
                    self.address = address
                    self._on_loading(self.name, "up", 1.0)
                    return
                case {"event": "failed", "error": error}:
                    raise ProcessStartError(f"{self.name}: {with_remedy(error)}")
        reason = with_remedy(await self.wait())
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _READ_OF_LOG))
            lines = log.read().decode(errors="replace").rstrip().splitlines()
        raise ProcessStartError(f"{self.name}: {reason}: {lines[-1].strip()[:500] if lines else 'its log is empty'}")


class ChildGroup:
    """Watches the processes started in its `async with` block, and stops them all at the end of the block.

    `on_exit` gets the name of each process that died or could not be restarted, and the reason. With `restart_seconds`,
    a process that died is started again after that time, and again after longer pauses until it is ready.
    """

    def __init__(
        self,
        on_exit: Callable[[str, str], None],
        restart_seconds: float | None = None,
        start_timeout_seconds: float = 900.0,
    ) -> None:
        self._on_exit = on_exit
        self._restart_seconds = restart_seconds
        self._start_timeout = start_timeout_seconds
        self._children: list[ChildProcess] = []
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self, *children: ChildProcess) -> None:
        """Starts all at once and returns when the last is ready. Raises the first ProcessStartError."""
        self._children += children
        starts = [asyncio.create_task(child.start(self._start_timeout)) for child in children]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        self._watchers += [asyncio.create_task(self._watch(child)) for child in children]

    async def watch(self) -> None:
        """Waits; raises what keeps a process from being watched."""
        await asyncio.gather(*self._watchers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(child.stop(_STOP_SECONDS) for child in self._children))

    async def _watch(self, child: ChildProcess) -> None:
        while True:
            reason = await child.wait()
            self._on_exit(child.name, f"died: {reason}")
            if self._restart_seconds is None:
                return
            backoff, is_up = Backoff(self._restart_seconds, _LONGEST_PAUSE_SECONDS), False
            while not is_up:
                await backoff.pause()
                try:
                    await child.start(self._start_timeout)
                    is_up = True
                except ProcessStartError as error:
                    self._on_exit(child.name, str(error))
