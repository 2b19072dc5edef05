"""`python -m bench.offline` from end to end, with real workers over tiny models, and transformers as a peer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import save_tokenizer, write_lines
from tests.support.tiny_models import save_tiny_pair

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    for model in save_tiny_pair("llama", folder):
        save_tokenizer(model)
    lines = ({"prompt": f"once upon a time {number}", "category": "ab"[number % 2]} for number in range(6))
    write_lines(folder / "prompts.jsonl", *lines)
    return folder


def test_measures_every_cell(folder: Path) -> None:
    models = ("llama-target", "--draft", "llama-draft", "--prompts", "prompts.jsonl", "--dtype", "float32")
    grid = ("--policy", "ragged", "--batch-size", "3", "--repeats", "2")
    peers = ("--peer", "transformers")
    few = ("--max-tokens", "8", "--threads", "1", "--count", "6", "--output", "out.json")
    command = [sys.executable, "-m", "bench.offline", *models, *grid, *peers, *few]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=500)
    result: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert {"command", "commit", "date", "machine"} <= result.keys()
    cells = {cell["point"]["system"]: cell for cell in result["cells"]}
    assert cells.keys() == {"plain", "ragged", "transformers"}
    assert len(result["measurements"]) == 2 * len(cells)
    for system, cell in cells.items():
        assert cell["exact_match"] == cell["like_spool"] == 1.0
        assert cell["tokens_per_second"]["median"] > 0
        if system == "transformers":
            assert cell["statistics"] == cell["domains"] == {}
            continue
        assert {name: domain["prompts"] for name, domain in cell["domains"].items()} == {"a": 3, "b": 3}
        assert (cell["acceptance_length"] > 1) is (system == "ragged")
        assert cell["acceptance_length"] == pytest.approx(cell["statistics"]["committed_per_round"], abs=0.2)
        assert cell["statistics"]["tokens"] == 6 * 8
        assert (cell["statistics"]["drafted"] > 0) is (system == "ragged")


def test_several_temperatures_beside_plain_decoding_in_one_run(folder: Path) -> None:
    models = ("llama-target", "--draft", "ngram", "--prompts", "prompts.jsonl", "--dtype", "float32")
    grid = ("--policy", "ragged", "--batch-size", "3", "--repeats", "1", "--temperatures", "0", "--temperatures", "1")
    few = ("--max-tokens", "8", "--threads", "1", "--output", "warm.json")
    command = [sys.executable, "-m", "bench.offline", *models, *grid, *few]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=500)
    result: dict[str, Any] = json.loads((folder / "warm.json").read_text())
    cells = {(cell["point"]["system"], cell["point"]["temperature"]) for cell in result["cells"]}
    assert cells == {(system, temperature) for system in ("plain", "ragged") for temperature in (0.0, 1.0)}
    assert {cell["exact_match"] for cell in result["cells"]} == {1.0}
    assert all(cell["ratio_to_plain"] is not None for cell in result["cells"])
