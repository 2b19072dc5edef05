"""Every change of a sequence's state is in one table, which the code checks."""

from __future__ import annotations

import ast
from pathlib import Path

from scheduler.state.sequence_record import SequenceState
from scheduler.transitions.table import TRANSITIONS, Cause

ROOT = Path(__file__).parents[3]
LAYERS = ("state", "speculation", "transitions", "batching")


def test_the_table_has_every_state_and_every_cause() -> None:
    assert TRANSITIONS.keys() == set(SequenceState)
    assert {cause for causes in TRANSITIONS.values() for cause in causes} == set(Cause)


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
