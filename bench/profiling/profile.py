"""What was learnt of a pair of models, in the words of a plan file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.profiling.step_law import StepLaw
from scheduler.config import SchedulerConfig

_DIGITS = 4
_LEAST_SECONDS = 1e-6
"""Of a pass: no pass takes no time at all, whatever a fit says."""


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """A model on the device `name`, where it has room for the KV of `kv_tokens`."""

    name: str
    law: StepLaw
    kv_tokens: int

    def measured(self) -> dict[str, Any]:
        """An entry of `measured` in a plan file."""
        law = self.law
        return {
            "name": self.name,
            "step_seconds": _rounded(max(law.step, _LEAST_SECONDS)),
            "token_seconds": _rounded(law.token),
            "block_tokens": law.block_tokens,
            "kv_token_seconds": _rounded(law.kv_token),
            "kv_tokens": self.kv_tokens,
        }


@dataclass(frozen=True, slots=True)
class Profile:
    """`acceptance` is the share of accepted ones of the draft tokens that came after accepted ones only, of which there
    were `tried`. The seconds are the scheduler's: a way to a worker, a step, and a sequence in it."""

    target: WorkerProfile
    draft: WorkerProfile
    acceptance: float
    tried: int
    wire_seconds: float
    step_seconds: float
    row_seconds: float

    def plan(self, config: SchedulerConfig) -> dict[str, Any]:
        """The fields of a plan file that do not depend on the traffic, for a scheduler that is set up so."""
        return {
            "acceptance": _rounded(self.acceptance),
            "target": {"measured": [self.target.measured()]},
            "draft": {"measured": [self.draft.measured()]},
            "scheduling": {
                "batch_size": config.batch_size,
                "draft_length": config.draft_length,
                "draft_ahead": config.draft_ahead,
                "prefill_chunk": config.prefill_chunk,
                "max_running_per_target": config.max_running,
                "wire_seconds": _rounded(self.wire_seconds),
                "step_seconds": _rounded(self.step_seconds),
                "row_seconds": _rounded(self.row_seconds),
            },
        }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
