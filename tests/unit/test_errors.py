"""Errors that Spool raises for reasons of its own can be told from all others."""

import ast
import builtins
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_error_has_the_same_base() -> None:
    found, others = 0, []
    for source in (file for folder in ("engine", "services", "deploy") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and not node.name.startswith("_"):
                found += 1
                if all(hasattr(builtins, ast.unparse(base)) for base in node.bases):
                    others.append(f"{source.relative_to(ROOT)}: {node.name}")
    assert found > 30
    # Of what builds a wheel, where nothing is installed.
    assert others == ["engine/cpu/compiler.py: CompilationError"]
