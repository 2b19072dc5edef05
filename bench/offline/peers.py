"""Other systems in processes that stay loaded, so that measurements can take turns with Spool's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.offline.grid import GridPoint, System
from spool.deploy.errors import RunError
from spool.engine.cpu.isa import library_limits

_SCRIPT = Path(__file__).with_name("peer_process.py")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# All of vLLM in one process, so that nothing of it runs between measurements.
_VLLM_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True, slots=True)
class PeerModels:
    """What every peer gets: the folders, dtype, prompts and threads that Spool has. `draft` is the folder of a draft
    model, "" for none."""

    target: str
    draft: str
    dtype: str
    device: str
    threads: int
    max_rows: int
    stop_token_ids: list[int]
    prompts: list[Sequence[int]]
    max_tokens: list[int]


class Peers:
    """Starts a peer when it is first asked for; all run until `stop`."""

    def __init__(self, models: PeerModels, cpu_isa: str, vllm_python: Path | None) -> None:
        self._models = models
        self._limits = library_limits(cpu_isa)
        self._vllm_python = vllm_python
        self._processes: dict[Any, _PeerProcess] = {}

    def measure(self, point: GridPoint) -> tuple[list[list[int]], float]:
        """The output for each prompt, and the seconds that all of them took. Raises `RunError`."""
        # vLLM loads its draft with the target.
        kind = point.system.plain, point.draft, point.draft_length
        if kind not in self._processes:
            self._processes[kind] = self._start(point)
        answer = self._processes[kind].ask({"batch_size": point.batch_size})
        return answer["tokens"], answer["seconds"]

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _start(self, point: GridPoint) -> _PeerProcess:
        models = self._models
        environment = dict.fromkeys(_THREAD_VARIABLES, str(models.threads)) | {"HF_HUB_OFFLINE": "1"} | self._limits
        python = Path(sys.executable)
        if point.system.plain is System.VLLM:
            if self._vllm_python is None:
                raise RunError("vllm_python is unset, must be the Python of an environment with vLLM")
            python = self._vllm_python
            environment |= _VLLM_ENVIRONMENT
        process = _PeerProcess(point.system.plain.value, python, environment)
        draft = models.draft if point.system is System.VLLM_DRAFT else point.draft
        try:
            process.ask(asdict(models) | {"draft": draft, "draft_length": point.draft_length})
        except RunError:
            process.kill()
            raise
        return process


class _PeerProcess:
    """A child that answers each JSON line with a JSON line."""

    def __init__(self, name: str, python: Path, environment: dict[str, str]) -> None:
        self._name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed in `kill`)
        try:
            self._process = subprocess.Popen(
                [str(python), str(_SCRIPT), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=os.environ | environment,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise RunError(f"the Python of {name} cannot be started: {error.strerror}") from error

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises `RunError` if the process ends."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RunError(f"{self._name} has no pipes")
        line = ""
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            last = (self._errors.read().decode(errors="replace").strip() or "no message").splitlines()[-1]
            raise RunError(f"{self._name} ended with exit code {code}: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """With every process that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()
