"""Slows, kills or limits a worker process: Python imports this at its start if this folder is on its path.

With SPOOL_STEP_SECONDS, a step with rows takes at least that time, and with SPOOL_STEP_SECONDS_FILE the time that this
file says when the step begins. With SPOOL_POISON, a row that holds half of these
token ids in sequence kills the process. Half, because a prompt may come in two rows. With SPOOL_ISAS, `name=set` and so
on, workers of these names have these instruction sets.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from spool.engine.cpu.isa import library_limits

# Before torch is imported.
_ISAS = dict(pair.split("=") for pair in os.environ.get("SPOOL_ISAS", "").split())
os.environ.update(library_limits(_ISAS.get(sys.orig_argv[-1], "auto")))

# ruff: noqa: E402
from spool.protos import worker_pb2
from spool.services.worker.executor import Reply, StepExecutor

_SECONDS = float(os.environ.get("SPOOL_STEP_SECONDS", "0"))
_SECONDS_FILE = os.environ.get("SPOOL_STEP_SECONDS_FILE")
_POISON = tuple(map(int, filter(None, os.environ.get("SPOOL_POISON", "").split(","))))
_LENGTH = len(_POISON) // 2
_PARTS = {_POISON[place : place + _LENGTH] for place in range(len(_POISON) - _LENGTH + 1)} if _POISON else set()

_execute = StepExecutor.execute


def _changed(self: StepExecutor, request: worker_pb2.StepRequest, *arguments: Any) -> Reply:
    began = time.monotonic()
    for row in request.rows:
        tokens = (*row.parameters.committed_tokens, *row.tokens)
        if any(tokens[place : place + _LENGTH] in _PARTS for place in range(len(tokens))):
            os.kill(os.getpid(), signal.SIGKILL)
    reply = _execute(self, request, *arguments)
    if request.rows or request.following.sequence_ids:
        seconds = _SECONDS if _SECONDS_FILE is None else float(Path(_SECONDS_FILE).read_text(encoding="ascii"))
        left = max(0.0, began + seconds - time.monotonic())
        time.sleep(left)
        timings = reply().timings
        timings.forward += left
        timings.total += left
    return reply


StepExecutor.execute = _changed  # type: ignore[method-assign,assignment]
