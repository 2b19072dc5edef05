"""Results say of which code they are: changes of what it does count, changes of what it says about itself do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.record import is_of_this_code, source_digest

PYTHON = '''"""A module."""

import os  # for its separator

SEPARATOR = os.sep  # "#" begins a comment
"""Between folders."""


def joined(*parts: str) -> str:
    """With a separator."""
    return f"{SEPARATOR}".join(parts)  # no "/"
'''
SAYS_MORE = PYTHON.replace("A module.", "A module\nof two lines.").replace("  # for its separator", "\n\n# Below.")


def digest_of(root: Path, python: str, c: str = "int x;") -> str:
    folder = root / "engine" / "cpu"
    folder.mkdir(parents=True)
    (folder / "paths.py").write_text(python, encoding="utf-8")
    (folder / "kernel.c").write_text(c, encoding="utf-8")
    (folder / "notes.md").write_text(str(root), encoding="utf-8")
    return source_digest(root)


def test_comments_docstrings_and_other_files_do_not_count(tmp_path: Path) -> None:
    assert digest_of(tmp_path / "old", PYTHON) == digest_of(tmp_path / "new", SAYS_MORE)


@pytest.mark.parametrize(
    ("python", "c"),
    [
        (PYTHON.replace("{SEPARATOR}", "#"), "int x;"),
        (PYTHON.replace('"#" begins', "begins").replace("os.sep", '"#"'), "int x;"),
        (PYTHON.replace("    return", "    print()\n    return"), "int x;"),
        (PYTHON, "int y;"),
    ],
    ids=["text", "value", "statement", "C"],
)
def test_what_code_does_counts(tmp_path: Path, python: str, c: str) -> None:
    assert digest_of(tmp_path / "old", PYTHON) != digest_of(tmp_path / "new", python, c)


def test_a_result_of_two_versions_is_of_none() -> None:
    assert is_of_this_code({"sources": [source_digest()]})
    assert not is_of_this_code({"sources": [source_digest(), "0123456789ab"]})
    assert not is_of_this_code({})
