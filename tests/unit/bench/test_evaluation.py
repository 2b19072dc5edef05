"""Two runs of an evaluation are compared document by document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.compatibility.evaluation import main


def write(folder: Path, task: str, responses: list[list[object]], run: str = "2026-01-01") -> None:
    (folder / "model").mkdir(parents=True, exist_ok=True)
    rows = [{"doc_id": number, "filtered_resps": given} for number, given in enumerate(responses)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "model" / f"samples_{task}_{run}.jsonl").write_text(text, encoding="utf-8")


def test_answers_and_log_likelihoods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, value in ((one, "-1.25"), (two, "-1.5")):
        write(folder, "facts", [[[value, "True"], ["-3", "False"]]])
        write(folder, "some_questions", [["an old answer"]], run="2025-01-01")
        write(folder, "some_questions", [["blue"], ["four"]])
        write(folder, f"only_{folder.name}", [["blue"]])
    assert main([str(one), str(two)]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == {
        "one: facts": {"answers": 2, "equal": 2, "largest_difference": 0.25},
        "one: some_questions": {"answers": 2, "equal": 2},
    }
    write(two, "some_questions", [["blue"], ["five"]])
    assert main([str(one), str(two)]) == 1
    write(two, "some_questions", [["blue"], ["four"]])
    write(two, "facts", [[["-1.25", "False"], ["-3", "False"]]])
    assert main([str(one), str(two)]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"]["one: facts"]["equal"] == 1


def test_runs_over_other_documents(tmp_path: Path) -> None:
    write(tmp_path / "one", "facts", [["blue"]])
    write(tmp_path / "two", "facts", [["blue"], ["red"]])
    with pytest.raises(ValueError, match="one run has 1 documents, the other has 2"):
        main([str(tmp_path / "one"), str(tmp_path / "two")])
