"""A Ray of Spool's own on this machine: started, found again, and stopped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from filelock import Timeout

from spool.deploy.cluster.ray_process import DETACH
from spool.deploy.cluster.served_state import StateFolder
from spool.deploy.errors import RunError, UsageError

_STOP_SECONDS = 120.0
_LONGEST_FOLDER = 40


def own_ray_environment(state: StateFolder) -> dict[str, str]:
    """The environment in which Ray is started, and joined, when it is Spool's own.

    Calls within Ray carry a token, which lies in Spool's folder. A scheduler that hangs is killed at once when another
    takes its place. Replicas are as nice as what started them, not Ray's 15: those that serve must not wait for
    whatever else runs. Nothing is reported to Ray's makers. A Ray that is no cluster has the address 127.0.0.1, so
    its processes, and the agents that tell its metrics, listen there alone. No request of a client comes
    through Serve, so replicas add up its metrics of them every two seconds, not ten times a second.
    """
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(state.ray_token_file()),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "2000",
    }


class LocalRay:
    """A Ray, with Serve on it, that is started here. Unless `detach` is called, it ends with this process."""

    def __init__(self, app_name: str, state: StateFolder) -> None:
        """Begins to start it: `wait_until_up` before it is used. Raises RunError."""
        self._app_name, self._state = app_name, state
        self._process = _start_process(app_name, state)
        self.address = ""
        self.attached = True

    @property
    def process_id(self) -> int:
        return self._process.pid

    def wait_until_up(self) -> None:
        """Raises RunError with Ray's own reason."""
        try:
            self.address = self._address_of_process()
        except RunError as error:
            # Ray gives its processes 30 s to start, which on a busy machine may be too little.
            if "timed out during startup" not in str(error):
                raise
            self._process = _start_process(self._app_name, self._state)
            self.address = self._address_of_process()

    def detach(self) -> None:
        """Lets it live on after this process."""
        if self._process.stdin is not None:
            self._process.stdin.write(f"{DETACH}\n".encode())
            self._process.stdin.close()
        self.attached = False

    def stop(self) -> None:
        """Stops it and all that runs on it."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _address_of_process(self) -> str:
        try:
            line = self._process.stdout.readline() if self._process.stdout is not None else b""
            event = json.loads(line) if line else {}
        except BaseException:
            self._process.kill()
            raise
        if event.get("event") != "ready":
            self._process.kill()
            self._process.wait()
            reason = event.get("error") or f"it ended with exit code {self._process.returncode}"
            raise RunError(f"Ray did not start: {reason} (log: {self._state.ray_log(self._app_name)})")
        address: str = event["address"]
        return address


def _start_process(app_name: str, state: StateFolder) -> subprocess.Popen[bytes]:
    folder = _folder(app_name)
    arguments = json.dumps([str(state.lock(app_name).lock_file), str(folder)])
    # Files of a Ray that has ended: the lock of the application is free. A session may also be a link to another.
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink()
    with state.ray_log(app_name).open("wb") as log:
        return subprocess.Popen(
            # -P: a folder named `spool` where the user happens to be, as a clone may be, must not come before ours.
            [sys.executable, "-P", "-m", "spool.deploy.cluster.ray_process", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **own_ray_environment(state)},
            # Ctrl-C goes to the whole foreground group; who started it decides when it stops.
            start_new_session=True,
        )


def stop_ray(app_name: str, process_id: int, state: StateFolder) -> None:
    """Stops the Ray started for an application, or what serves it without Ray; one that is gone is no error."""
    if not state.is_alive(app_name):
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGTERM)
    if _wait_for_end(app_name, state, _STOP_SECONDS):
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)
    if not _wait_for_end(app_name, state, 10.0):
        raise RunError(f"{app_name}, process {process_id}, does not end")


def _wait_for_end(app_name: str, state: StateFolder, seconds: float) -> bool:
    lock = state.lock(app_name)
    try:
        with lock.acquire(timeout=seconds, poll_interval=0.1):
            return True
    except Timeout:
        return False


def _folder(app_name: str) -> Path:
    """Ray lets everybody write to its folder and to what it makes there, so the folder above lets nobody else in.

    The path of a socket has 107 characters at most, and Ray's names below its folder take the rest.
    """
    above = Path(tempfile.gettempdir()) / f"spool-{os.getuid()}"
    folder = above / hashlib.sha256(app_name.encode()).hexdigest()[:8]
    if len(str(folder)) > _LONGEST_FOLDER:
        raise UsageError(f"{folder} is too long for Ray's sockets: $TMPDIR names another folder")
    for own in (above, folder):
        try:
            own.mkdir(exist_ok=True, mode=0o700)
            # Somebody else may have made it beforehand, or a link in its place.
            descriptor = os.open(own, os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                owner = os.fstat(descriptor).st_uid
                if owner == os.getuid():
                    os.fchmod(descriptor, 0o700)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RunError(f"{own} cannot be made a folder: {error.strerror} ($TMPDIR names another)") from error
        if owner != os.getuid():
            raise RunError(f"{own} belongs to user {owner}, must belong to user {os.getuid()} ($TMPDIR names another)")
    return folder
