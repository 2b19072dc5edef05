"""A paced worker (bench/control_plane/worker.py) that hangs in its step from one SIGUSR1 to the next, and answers pings
all the while: run by `python -m bench.chaos.hung_target`."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from bench.control_plane.worker import PacedTarget, load
from spool.engine.steps import Computing, RowOutcome, StepOutcome, VerifyRow, no_callback
from spool.services.worker.process import Progress, Serve, WorkerArguments, parse_arguments, run_worker

_goes_on = threading.Event()
_goes_on.set()


class HangingTarget(PacedTarget):
    """Every token is the target's number, so that streams tell who computed them."""

    def __init__(self, number: int, *paced: Any) -> None:
        super().__init__(*paced)
        self._number = number

    def step(self, rows: Sequence[VerifyRow], computing: Computing = no_callback) -> StepOutcome:
        _goes_on.wait()
        outcome = super().step(rows, computing)
        return StepOutcome([self._own(row) for row in outcome.rows], outcome.timings)

    def _own(self, row: RowOutcome) -> RowOutcome:
        return RowOutcome([self._number] * len(row.tokens), row.accepted)


def load_hanging(arguments: WorkerArguments, progress: Progress) -> Serve:
    return load(arguments, progress, lambda *paced: HangingTarget(arguments.settings["number"], *paced))


def _turn(*_: object) -> None:
    if _goes_on.is_set():
        _goes_on.clear()
    else:
        _goes_on.set()


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _turn)
    sys.exit(run_worker(parse_arguments(), load_hanging))
