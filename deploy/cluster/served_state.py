"""What `spool serve` leaves behind for `spool status`, `chat` and `down`: one small file for each application."""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_state_path

from spool.deploy.errors import RunError, UsageError

STATE_VARIABLE = "SPOOL_STATE"

_APP_NAME = re.compile(r"[\w.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Served:
    """One application. `process_id` is that of the Ray started for it, None where it runs on another's; there
    `started_serve` says whether Ray Serve was started for it. `log_folder` is where processes on this machine leave
    their logs.

    Without Ray, `ray_address` is None, `process_id` that of the parent of all processes, and the scheduler is at
    `scheduler_address`; `scheduler_security` says how to call it, as JSON with the token.
    """

    app_name: str
    ray_address: str | None
    process_id: int | None
    http_url: str
    grpc_address: str | None
    model: str
    started_serve: bool
    log_folder: str
    scheduler_address: str | None = None
    scheduler_security: str | None = None


class StateFolder:
    """The user's folder for such files, `$SPOOL_STATE` or the usual one; only the user can read it."""

    def __init__(self) -> None:
        chosen = os.environ.get(STATE_VARIABLE)
        self.path = Path(chosen).expanduser().absolute() if chosen else user_state_path("spool")
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise RunError(f"{self.path} cannot be made: {error.strerror} (${STATE_VARIABLE} names another)") from error

    def read(self, app_name: str) -> Served | None:
        """None where nothing of the name was served, or the file is from another version."""
        try:
            return Served(**json.loads(self._file(app_name).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def write(self, served: Served) -> None:
        self._write_private(self._file(served.app_name), json.dumps(asdict(served), indent=2))

    def forget(self, app_name: str) -> None:
        self._file(app_name).unlink(missing_ok=True)

    def lock(self, app_name: str) -> FileLock:
        """Held by the Ray that was started for the application, or by what replaces Ray, for as long as that lives."""
        return FileLock(self._file(app_name).with_suffix(".lock"), timeout=0)

    def is_alive(self, app_name: str) -> bool:
        """Whether what was started for the application is there; a process of the same number is not taken for it."""
        try:
            with self.lock(app_name):
                return False
        except Timeout:
            return True

    def ray_log(self, app_name: str) -> Path:
        return self._file(app_name).with_suffix(".log")

    def run_folder(self, app_name: str) -> Path:
        """Logs and files of the processes that serve the application without Ray."""
        return self._file(app_name).with_suffix(".run")

    def ray_token_file(self) -> Path:
        """The token of all Rays started here; without one, Ray would leave one in the user's home."""
        file = self.path / "ray_token"
        if not (file.is_file() and file.read_text().strip()):
            self._write_private(file, secrets.token_hex(32))
        return file

    def _write_private(self, file: Path, content: str) -> None:
        scratch = file.with_name(f".{file.name}.{os.getpid()}")
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as target:
            target.write(content)
        scratch.replace(file)

    def _file(self, app_name: str) -> Path:
        if not _APP_NAME.fullmatch(app_name):
            raise UsageError(f"the application's name is {app_name!r}, must be up to 64 letters, digits, '.', '_', '-'")
        return self.path / f"{app_name}.json"
