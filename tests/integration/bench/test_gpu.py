"""`python -m bench.gpu` on a CPU with a tiny pair: it comes to its end with few packages, and keeps what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spool.engine.models.source import CACHE_VARIABLE, cache_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
# A machine for measuring has little more than torch and transformers.
ABSENT = (
    *("platformdirs", "llguidance", "google.protobuf", "grpc", "pydantic", "ray", "fastapi", "starlette", "uvicorn"),
    *("prometheus_client", "matplotlib", "scipy", "accelerate", "gguf"),
)


def started(out: Path, absent: Sequence[str], *arguments: str) -> subprocess.Popen[str]:
    """Neither the process nor any that it starts can import the absent packages."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent!r}))\n")
    environment = os.environ | {"PYTHONPATH": str(out), "OMP_NUM_THREADS": "1", CACHE_VARIABLE: str(cache_folder())}
    environment.pop("TRITON_INTERPRET", None)  # the tests of kernels are interpreted
    command = [sys.executable, "-m", "bench.gpu", "--out", str(out), "--device", "cpu", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def kept(out: Path) -> list[dict[str, Any]]:
    lines = (out / "findings.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def run_to_its_end(out: Path, absent: Sequence[str], *arguments: str) -> list[dict[str, Any]]:
    process = started(out, absent, "--seconds", "500", *arguments)
    told, errors = process.communicate()
    assert process.returncode == 0, told + errors
    return kept(out)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_to_its_end(tmp_path_factory.mktemp("gpu"), ABSENT)


def named(found: list[dict[str, Any]], start: str) -> list[dict[str, Any]]:
    chosen = [line for line in found if line["what"].startswith(start)]
    assert chosen, start
    return chosen


def test_all_blocks_come_to_their_end(found: list[dict[str, Any]]) -> None:
    assert not [line for line in found if line["what"] in ("failed", "out of time")]
    blocks = list(dict.fromkeys(line["block"] for line in found))
    assert [line["block"] for line in found if line["what"] == "done"] == blocks
    origin = found[0]
    assert origin["what"] == "origin"
    assert {"command", "commit", "date", "machine"} <= origin.keys()


def test_speculation_writes_what_plain_decoding_writes(found: list[dict[str, Any]]) -> None:
    for line in named(found, "logits alone and in speculation"):
        assert line["equal_rows"] == line["rows"] > 0
        assert line["equal_texts"] == line["streams"]
        assert line["expected_texts"] == line["compared_with_expected"]
    for line in (*named(found, "killed and resumed"), *named(found, "KV moved")):
        assert line["equal_tokens"] == line["equal_logits"] == line["tokens"] > 0
    for line in named(found, "draft inside"):
        assert line["equal_tokens"] == line["tokens"] > 0


def test_the_pair_is_served(tmp_path: Path) -> None:
    """With what a server needs and no Ray; texts with drafts, and beside workers that die, are those without."""
    found = run_to_its_end(tmp_path, ["ray"], "--only", "served")
    assert found[-1]["what"] == "done"
    assert {"started, draft inside", "started, draft worker", "prefill"} <= {line["what"] for line in found}
    compared = [line for line in found if "equal_texts" in line]
    for what in ("auto, draft inside", "auto, draft worker", "top_k 20", "target killed", "draft killed"):
        assert named(compared, what)
    assert all(line["equal_texts"] == line["texts"] > 0 for line in compared)
    # A draft worker may be late for every step of a busy machine, a draft inside never.
    assert all(line["drafted"] for line in named(compared, "target killed"))
    assert not (tmp_path / "pair").exists()
