"""Every change of a sequence's state is in one table, which the code checks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scheduler.messages import FinishReason, SequenceCancelled
from scheduler.state.sequence_record import SequenceState
from scheduler.transitions.table import TRANSITIONS, Cause, IllegalTransitionError
from tests.unit.scheduler.driver import pair

ROOT = Path(__file__).parents[3]
LAYERS = ("state", "speculation", "transitions", "batching")


def test_the_table_has_every_state_and_every_cause() -> None:
    assert TRANSITIONS.keys() == set(SequenceState)
    assert {cause for causes in TRANSITIONS.values() for cause in causes} == set(Cause)


def test_a_change_that_the_table_does_not_have_raises_and_changes_nothing() -> None:
    driver = pair()
    driver.submit(1, prompt_length=9)
    sequence = driver.core._live.sequences[1]
    assert sequence.state is SequenceState.PREFILLING
    with pytest.raises(IllegalTransitionError, match="sequence 1 is prefilling, which 'verify sent' cannot change"):
        driver.core._lifecycle.start_verifying(sequence)
    assert sequence.state is SequenceState.PREFILLING
    driver.core.check_integrity()


def test_a_sequence_that_has_ended_changes_no_more() -> None:
    driver = pair()
    driver.submit(1, prompt_length=9)
    sequence = driver.core._live.sequences[1]
    driver.core.handle([SequenceCancelled(1)], 0.0)
    assert sequence.state is SequenceState.CANCELLED
    with pytest.raises(IllegalTransitionError, match="is cancelled"):
        driver.core._lifecycle.finish(sequence, FinishReason.STOP)


def test_only_the_lifecycle_changes_states() -> None:
    """Outside of it, only a new sequence gets one."""
    assignments = {
        str(source.relative_to(ROOT))
        for source in sorted((ROOT / "scheduler").rglob("*.py"))
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and target.attr == "state"
    }
    assert assignments == {"scheduler/state/sequence_record.py", "scheduler/transitions/lifecycle.py"}


def test_sub_packages_import_only_those_below_them() -> None:
    upward = [
        f"{source.relative_to(ROOT)} imports {node.module}"
        for place, layer in enumerate(LAYERS)
        for source in sorted((ROOT / "scheduler" / layer).glob("*.py"))
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for imported in [(node.module or "").split(".")[1:2]]
        if imported and imported[0] in LAYERS[place + 1 :]
    ]
    assert upward == []
