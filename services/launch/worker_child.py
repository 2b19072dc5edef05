"""One worker process as its parent sees it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.cpu.isa import AUTO
from scheduler.messages import Role
from services.launch.process_tuning import compute_environment
from services.rpc.channel_security import SECURITY_VARIABLE, ChannelSecurity


class WorkerStartError(RuntimeError):
    """A worker process did not become ready; the message is one line with the worker's own reason."""


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """How to start one worker.

    `settings` go to the worker's engine as JSON (see engine/settings.py). `threads` bounds the compute threads of the
    process (0: the libraries decide), `cpus` the CPUs that it runs on (empty: any). `module` is the Python module to
    run, which must report the same events as services.worker.process. Raises ValueError naming field, value and limit.
    """

    role: Role
    settings: Mapping[str, Any]
    threads: int = 0
    cpus: tuple[int, ...] = ()
    name: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = "services.worker.process"
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if not 0 <= self.threads <= 1024:
            raise ValueError(f"threads is {self.threads}, must be between 0 and 1024")
        if any(cpu < 0 for cpu in self.cpus):
            raise ValueError(f"cpus is {self.cpus}, must be numbers of CPUs")


class WorkerChild:
    """Starts, watches and stops the process of one worker. One that has died can be started again, on its port."""

    def __init__(
        self,
        worker_id: str,
        launch: WorkerLaunch,
        log_path: Path,
        on_loading: Callable[[str, float | None], None],
        security: ChannelSecurity,
    ) -> None:
        self.worker_id = worker_id
        self.launch = launch
        self.log_path = log_path
        self.address = ""
        self._on_loading = on_loading
        self._security = security
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process_id(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self, timeout_seconds: float) -> None:
        """Returns once the worker is ready. Raises WorkerStartError, and leaves no process behind then."""
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
        raise WorkerStartError(f"worker {self.worker_id}: {reason}")

    async def wait(self) -> str:
        """Waits for the end of the process and says how it ended."""
        if self._process is None:
            return "was never started"
        # A worker prints no events after "ready". Reading to the end keeps the pipe from filling up if one does.
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

    async def _spawn(self) -> asyncio.subprocess.Process:
        launch = self.launch
        settings = dict(launch.settings)
        # Secrets go into the environment: every user of the machine can read command lines.
        environment = {
            **os.environ,
            **compute_environment(launch.threads, settings.get("cpu_isa", AUTO)),
            SECURITY_VARIABLE: self._security.to_json(),
        }
        if launch.threads:
            settings["threads"] = launch.threads
        command = [
            # -P: a folder named `services` in the current directory must not shadow this package.
            *(sys.executable, "-P", "-m", launch.module),
            *("--role", launch.role.value, "--settings", json.dumps(settings), "--watch-stdin"),
            *("--port", self.address.rpartition(":")[2] or "0"),
            *("--cpus", ",".join(map(str, launch.cpus)), "--log-level", launch.log_level),
        ]
        with self.log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment | dict(launch.environment),
                # Ctrl-C goes to the whole foreground group; the parent alone decides when its workers stop.
                start_new_session=True,
            )

    async def _until_ready(self, process: asyncio.subprocess.Process) -> str | None:
        """None when the worker is ready, the reason when it failed, "" when its output ended without either."""
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
