"""bench.compatibility.load_tools on files in the form of the tools' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.compatibility.load_tools import main

GUIDELLM: dict[str, Any] = {
    "metadata": {"guidellm_version": "0.8.1"},
    "benchmarks": [
        {
            "metrics": {
                "request_totals": {"successful": 11, "errored": 0, "incomplete": 1, "total": 12},
                "output_tokens_per_second": {"successful": {"mean": 30.5}},
            }
        }
    ],
}
AIPERF: dict[str, Any] = {
    "aiperf_version": "0.13.0",
    "request_count": {"unit": "requests", "avg": 24.0},
    "error_summary": [],
    "output_token_throughput": {"avg": 67.0},
}
VLLM: dict[str, Any] = {"backend": "openai-chat", "num_prompts": 24, "completed": 24, "output_throughput": 70.0}


def kept(folder: Path, *contents: dict[str, Any]) -> list[str]:
    files = [folder / f"{number}.json" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_text(json.dumps(content), encoding="utf-8")
    return [str(file) for file in files]


def test_counts_requests_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(kept(tmp_path, AIPERF, VLLM)) == 0
    assert [(run["requests"], run["errors"]) for run in json.loads(capsys.readouterr().out)["runs"]] == [
        (24, 0),
        (24, 0),
    ]


@pytest.mark.parametrize(
    ("content", "errors"),
    [
        (GUIDELLM, 1),
        (AIPERF | {"error_summary": [{"count": 2, "error_details": {}}]}, 2),
        (VLLM | {"completed": 21}, 3),
    ],
)
def test_a_request_without_an_answer_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: dict[str, Any], errors: int
) -> None:
    assert main(kept(tmp_path, content)) == 1
    assert [run["errors"] for run in json.loads(capsys.readouterr().out)["runs"]] == [errors]


def test_another_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = kept(tmp_path, {"something": 1})
    with pytest.raises(SystemExit):
        main([file])
    assert file in capsys.readouterr().err
