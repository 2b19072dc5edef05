"""A result says with which command, at which commit, when and on which machine it was measured."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, date, datetime
from pathlib import Path

from bench.record import commit_of, describe_machine, write_result


def git(folder: Path, *arguments: str) -> str:
    author = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    done = subprocess.run(["git", "-C", str(folder), *author, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_result_has_its_command_commit_date_and_machine(tmp_path: Path) -> None:
    file = tmp_path / "results" / "speed.json"
    write_result(file, "python -m bench.speed", {"rows": 5})
    content = json.loads(file.read_text(encoding="utf-8"))
    assert list(content) == ["command", "commit", "date", "machine", "result"]
    assert content["command"] == "python -m bench.speed"
    assert abs(date.fromisoformat(content["date"]) - datetime.now(UTC).date()).days <= 1
    assert content["machine"] == describe_machine()
    assert content["result"] == {"rows": 5}


def test_a_commit_with_changed_files_is_told_apart(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "--quiet", "-m", "One")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(tmp_path) == commit
    (tmp_path / "code.py").write_text("2")
    assert commit_of(tmp_path) == f"{commit} changed"
