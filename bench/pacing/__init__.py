"""Workers whose steps take as long as on devices of their own: they compute, and then they sleep.

For measuring what the scheduler and the autoscaling policy do with many workers on few cores. Models, tokens and all
else are real; only the time of a step is made.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from engine.steps import Computing, ProposeRow, StepOutcome, VerifyRow

VARIABLE = "SPOOL_BENCH_PACE"

# Python imports a module `sitecustomize` from there at the start of every process.
_SITE = Path(__file__).parent / "site"


@dataclass(frozen=True)
class Pace:
    """Seconds of a target's step, and of each token in it; of a draft's pass, and of each sequence in it."""

    target_step: float
    target_token: float
    draft_pass: float
    draft_sequence: float

    def target_seconds(self, rows: Sequence[VerifyRow]) -> float:
        return self.target_step + self.target_token * sum(len(row.tokens) + len(row.draft_tokens) for row in rows)

    def draft_seconds(self, rows: Sequence[ProposeRow]) -> float:
        passes = max(1, max((row.draft_length for row in rows), default=0))
        return passes * (self.draft_pass + self.draft_sequence * len(rows))


def environment(pace: Pace) -> dict[str, str]:
    """Of processes that keep to the pace."""
    folders = filter(None, (str(_SITE), os.environ.get("PYTHONPATH")))
    return {VARIABLE: json.dumps(asdict(pace)), "PYTHONPATH": os.pathsep.join(folders)}


@contextmanager
def paced(pace: Pace) -> Iterator[None]:
    """Processes started inside the block, and those that they start, keep to the pace."""
    of_workers = environment(pace)
    before = {name: os.environ.get(name) for name in of_workers}
    os.environ |= of_workers
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def slow_down(engine: type[Any], seconds: str) -> None:
    """`seconds` names the method of Pace that says how long a step of this class of engines takes."""
    of_rows = getattr(Pace(**json.loads(os.environ[VARIABLE])), seconds)
    step = engine.step

    @wraps(step)
    def slowly(self: Any, rows: Sequence[Any], computing: Computing) -> StepOutcome:
        began = time.perf_counter()
        outcome: StepOutcome = step(self, rows, computing)
        left = began + of_rows(rows) - time.perf_counter()
        if left > 0:
            time.sleep(left)
            outcome.timings.forward += left
        return outcome

    engine.step = slowly
