"""Steps take the time that they are told to, in every process that is started meanwhile, and compute what they did."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.pacing import VARIABLE, Pace, paced
from engine.drafting.model_draft import DraftEngine
from engine.kv.pages import PageTable
from engine.steps import ProposeRow, VerifyRow
from engine.target import TargetEngine
from scheduler.sampling import SamplingParameters

PACE = Pace(target_step=0.08, target_token=0.001, draft_pass=0.01, draft_sequence=0.002)
GREEDY = SamplingParameters()


def test_a_step_takes_what_its_rows_ask_for() -> None:
    verify = [VerifyRow(PageTable(), [1], [2, 3, 4], True, [1], 1, GREEDY) for _ in range(5)]
    assert PACE.target_seconds(verify) == 0.08 + 0.001 * 20
    propose = [ProposeRow(PageTable(), [1], length, [1], 1, GREEDY) for length in (0, 3, 2)]
    assert PACE.draft_seconds(propose) == 3 * (0.01 + 0.002 * 3)
    assert PACE.draft_seconds(propose[:1]) == 0.01 + 0.002


CHILD = """
from engine.kv.pages import PageTable
import engine.drafting.model_draft, engine.target
for kind in (engine.target.TargetEngine, engine.drafting.model_draft.DraftEngine):
    print(hasattr(kind.step, "__wrapped__"))
"""


@pytest.mark.slow
def test_processes_started_meanwhile_are_slowed() -> None:
    before = dict(os.environ)
    with paced(PACE):
        assert VARIABLE in os.environ
        done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
    assert dict(os.environ) == before
    # Here nothing is.
    assert not any(hasattr(kind.step, "__wrapped__") for kind in (TargetEngine, DraftEngine))
