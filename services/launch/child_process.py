"""One process of Spool as its parent sees it: started, heard while it loads, watched, and stopped."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


class ProcessStartError(RuntimeError):
    """A process did not become ready; the message is one line with the process's own reason."""


async def start_all(starts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at once. The first that fails ends the others, and its error is raised once they have ended."""
    tasks = [asyncio.create_task(start) for start in starts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ChildProcess(ABC):
    """Starts, watches and stops one process. One that has died can be started again, on its port.

    The process reports as services.worker.process does, and stops when its standard input ends. `name` is for messages;
    what the process writes to its standard error goes to `log_path`.
    """

    def __init__(self, name: str, log_path: Path, on_loading: Callable[[str, float | None], None]) -> None:
        self.name = name
        self.log_path = log_path
        self.address = ""
        self._on_loading = on_loading
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process_id(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self, timeout_seconds: float) -> None:
        """Returns once the process is ready. Raises ProcessStartError, and leaves no process behind then."""
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        try:
            self._process = await self._spawn()
            async with asyncio.timeout(timeout_seconds):
                reason = await self._until_ready(self._process)
        except TimeoutError:
            reason = f"not ready after {timeout_seconds:g} s"
        except OSError as error:
            reason = f"cannot be started: {error}"
        except BaseException:
            self.kill()
            raise
        if reason is None:
            return
        if not reason:
            reason = await self.wait() + self._last_words(log_start)
        await self.stop(timeout_seconds=0)
        raise ProcessStartError(f"{self.name}: {reason}")

    async def wait(self) -> str:
        """Waits for the end of the process and says how it ended."""
        if self._process is None:
            return "was never started"
        # A process prints no events after "ready". Reading to the end keeps the pipe from filling up if one does.
        if self._process.stdout is not None:
            await self._process.stdout.read()
        code = await self._process.wait()
        return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"

    async def stop(self, timeout_seconds: float) -> None:
        """SIGTERM, and SIGKILL if the process is still there after the time given."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            process.terminate()
            async with asyncio.timeout(timeout_seconds):
                await process.wait()
        except ProcessLookupError:
            return
        except TimeoutError:
            self.kill()
            await process.wait()
        finally:
            self.kill()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.kill()
            except ProcessLookupError:
                return

    @abstractmethod
    def command(self, port: int) -> Sequence[str]:
        """The command line of the process, which is to listen on `port` (0: a free one)."""

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """All variables of the process. Secrets go here: every user of the machine can read command lines."""

    async def _spawn(self) -> asyncio.subprocess.Process:
        with self.log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self.command(int(self.address.rpartition(":")[2] or 0)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self.environment(),
                # Ctrl-C goes to the whole foreground group; the parent alone decides when its children stop.
                start_new_session=True,
            )

    async def _until_ready(self, process: asyncio.subprocess.Process) -> str | None:
        """None when the process is ready, the reason when it failed, "" when its output ended without either."""
        if process.stdout is None:
            raise RuntimeError("the process was started without a pipe")
        while line := await process.stdout.readline():
            try:
                event = json.loads(line)
                kind = event["event"]
                if kind == "loading":
                    self._on_loading(str(event["message"]), event["fraction"])
                elif kind == "ready":
                    self.address = str(event["address"])
                    return None
                elif kind == "failed":
                    return str(event["error"])
            except (ValueError, KeyError, TypeError) as error:
                return f"sent a line that is no event: {line[:200]!r} ({error!r})"
        return ""

    def _last_words(self, log_start: int) -> str:
        with self.log_path.open("rb") as log:
            log.seek(log_start)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1][:500]}" if lines else ""
