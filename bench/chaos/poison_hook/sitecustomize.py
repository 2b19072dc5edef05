"""Makes a worker process die of a poisoned prompt: Python imports this at its start where this folder is on its path.

A row that holds half of the tokens in SPOOL_POISON, one after the other, ends the process as the kernel would for want
of memory: at once, and without a word. Half, since a prompt may come in two rows.
"""

import os
import signal
from typing import Any

from protos import worker_pb2
from services.worker.executor import StepExecutor

_POISON = tuple(map(int, os.environ["SPOOL_POISON"].split(",")))
_LENGTH = len(_POISON) // 2
_PARTS = {_POISON[place : place + _LENGTH] for place in range(len(_POISON) - _LENGTH + 1)}

_execute = StepExecutor.execute


def _deadly(self: StepExecutor[Any], request: worker_pb2.StepRequest, *arguments: Any) -> worker_pb2.StepReply:
    for row in request.rows:
        tokens = tuple(row.tokens)
        if any(tokens[place : place + _LENGTH] in _PARTS for place in range(len(tokens))):
            os.kill(os.getpid(), signal.SIGKILL)
    return _execute(self, request, *arguments)


StepExecutor.execute = _deadly  # type: ignore[method-assign,assignment]
