"""Other systems in processes of their own, which stay up so that measurements can take turns with ours."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.offline.grid import GridPoint, System
from deploy.offline.decoding import Job
from engine.cpu.isa import library_limits

_MAIN = Path(__file__).with_name("peer_main.py")
_LONGEST_LINE = 1 << 26
_LAST_WORDS = 2000
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_VLLM_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "3",
    # All in one process, so that nothing of it runs between measurements.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


class PeerError(RuntimeError):
    """The other system cannot be measured; the message is one line that says why."""


@dataclass(frozen=True, slots=True)
class PeerModels:
    """What every peer is given: the same folders, numbers, prompts and threads as Spool."""

    target: Path
    drafts: dict[str, Path]
    dtype: str
    cpu_isa: str
    device: str
    threads: int
    stop_token_ids: frozenset[int]
    jobs: Sequence[Job]


@dataclass(frozen=True, slots=True)
class _Kind:
    """One process: transformers loads its models once for all cells, vLLM once for each draft and draft length."""

    plain: System
    draft: str | None
    draft_length: int


class Peers:
    """Starts peers as they are asked for; all end with the `async with` block."""

    def __init__(self, models: PeerModels, points: Sequence[GridPoint], vllm_python: Path | None) -> None:
        self._models = models
        self._points = [point for point in points if not point.system.is_spool]
        self._vllm_python = vllm_python
        self._processes: dict[_Kind, _PeerProcess] = {}
        self._broken: dict[_Kind, str] = {}

    async def measure(self, point: GridPoint, prompts: Sequence[int]) -> tuple[list[list[int]], float]:
        """Outputs of the prompts with these numbers, and the seconds they took. Raises `PeerError`, then always."""
        kind = _kind(point)
        if kind in self._broken:
            raise PeerError(self._broken[kind])
        request = {"batch_size": point.batch_size, "prompts": list(prompts), "drafting": point.system.drafts}
        try:
            if kind not in self._processes:
                self._processes[kind] = await self._start(kind)
            answer = await self._processes[kind].ask(request | {"draft_length": point.draft_length})
        except PeerError as error:
            self._broken[kind] = str(error)
            raise
        return answer["tokens"], answer["seconds"]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes.values()))

    async def _start(self, kind: _Kind) -> _PeerProcess:
        models = self._models
        mine = [point for point in self._points if _kind(point) == kind]
        drafts = {point.draft for point in mine if point.draft is not None}
        if len(drafts) > 1:
            raise PeerError(f"{kind.plain.value} takes one draft at a time, not {', '.join(sorted(drafts))}")
        request = {
            "target": str(models.target),
            "draft": next((str(models.drafts.get(draft, draft)) for draft in drafts), None),
            "dtype": models.dtype,
            "device": models.device,
            "threads": models.threads,
            "draft_length": kind.draft_length,
            "max_rows": max(point.batch_size for point in mine),
            "prompts": [job.tokens for job in models.jobs],
            "max_tokens": [job.max_tokens for job in models.jobs],
            "stop_token_ids": sorted(models.stop_token_ids),
        }
        environment = dict.fromkeys(_THREAD_VARIABLES, str(models.threads)) | {"HF_HUB_OFFLINE": "1"}
        environment |= library_limits(models.cpu_isa)
        if kind.plain is not System.VLLM:
            command = [sys.executable, str(_MAIN), "transformers_peer"]
        elif self._vllm_python is None:
            raise PeerError("no --vllm-python was given")
        else:
            command = [str(self._vllm_python), str(_MAIN), "vllm_peer"]
            environment |= _VLLM_ENVIRONMENT
        return await _PeerProcess.start(kind.plain.value, command, environment, request)


class _PeerProcess:
    """A child that answers one JSON line with one JSON line."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process
        self._said = b""
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, name: str, command: Sequence[str], environment: dict[str, str], first: Any) -> _PeerProcess:
        """Returns once its models are loaded."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env={**os.environ, **environment},
                limit=_LONGEST_LINE,
                # A group of its own, which ends as one. Ctrl-C goes to the foreground group alone.
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(f"the Python of {name} cannot be started: {error.strerror}") from error
        peer = cls(name, process)
        try:
            await peer.ask(first)
        except BaseException:
            await peer.stop()
            raise
        return peer

    async def ask(self, request: Any) -> dict[str, Any]:
        if self._process.stdin is None or self._process.stdout is None:
            raise PeerError(f"{self._name} has no pipes")
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise PeerError(await self._last_words()) from None
        line = await self._process.stdout.readline()
        if not line:
            raise PeerError(await self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def stop(self) -> None:
        """Its standard input ends, and it with it, at once (bench/peers); one that goes on is killed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(20):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._listening.cancel()

    async def _listen(self) -> None:
        """Reads what it prints, so that its pipe never fills up, and remembers the end of it."""
        while self._process.stderr is not None and (part := await self._process.stderr.read(1 << 16)):
            self._said = (self._said + part)[-_LAST_WORDS:]

    async def _last_words(self) -> str:
        code = await self._process.wait()
        await self._listening
        lines = [line for line in self._said.decode(errors="replace").splitlines() if line.strip()]
        return f"{self._name} ended with exit code {code}: {lines[-1].strip() if lines else 'not a word'}"


def _kind(point: GridPoint) -> _Kind:
    if point.system.plain is System.TRANSFORMERS:
        return _Kind(System.TRANSFORMERS, None, 0)
    return _Kind(System.VLLM, point.draft, point.draft_length)
