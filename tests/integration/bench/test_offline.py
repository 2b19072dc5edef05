"""`spool bench offline` from end to end, with real workers over tiny models and transformers beside them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import Ended, save_tokenizer, spool, write_lines
from tests.support.tiny_models import save_tiny_pair

pytestmark = pytest.mark.slow

PROMPTS = [{"prompt": f"once upon a time {index}", "category": "ab"[index % 2]} for index in range(6)]
GRID = ("--policy", "plain", "--policy", "ragged", "--batch-size", "1", "--batch-size", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    for model in save_tiny_pair("llama", folder):
        save_tokenizer(model)
    write_lines(folder / "prompts.jsonl", *PROMPTS)
    return folder


def bench(folder: Path, *arguments: object) -> Ended:
    models = ("--target", "llama-target", "--draft", "llama-draft", "--prompts", "prompts.jsonl", "--dtype", "float32")
    few = ("--max-tokens", "8", "--threads", "1", "--plain-threads", "1", "--output", "out.json")
    return spool("bench", "offline", *models, *few, *arguments, cwd=folder)


def speeds(folder: Path) -> dict[tuple[Any, ...], float]:
    """Tokens per second of each measurement."""
    found = json.loads((folder / "out.json").read_text())["measurements"]
    return {
        (one["point"]["system"], one["point"]["batch_size"], one["point"]["category"], one["repeat"]): one[
            "tokens_per_second"
        ]
        for one in found
    }


def test_measures_a_grid_and_goes_on_with_it(folder: Path) -> None:
    ended = bench(folder, *GRID, "--repeats", "1", "--trace", "trace.json", "--json")
    assert ended.code == 0, ended.err
    cells = ended.summary["cells"]
    assert [(cell["point"]["system"], cell["point"]["batch_size"]) for cell in cells] == [
        ("plain", 1),
        ("ragged", 1),
        ("plain", 3),
        ("ragged", 3),
    ]
    for cell in cells:
        assert cell["exact_match"] == 1.0
        assert cell["statistics"]["tokens"] == 6 * 8
        assert cell["tokens_per_second"]["median"] > 0
        assert cell["categories"].keys() == {"a", "b"}
        assert sum(category["tokens"] for category in cell["categories"].values()) == 6 * 8
        drafting = cell["point"]["system"] == "ragged"
        assert (cell["statistics"]["drafted"] > 0) is drafting
        assert (cell["hidden_draft_share"] is not None) is drafting
        for category in cell["categories"].values():
            assert bool(category["drafted_at"]) is drafting
    plain = cells[2]["tokens_per_second"]["median"]
    assert cells[3]["ratio_to_plain"]["median"] == pytest.approx(cells[3]["tokens_per_second"]["median"] / plain)
    lanes = {
        e["args"]["name"]
        for e in json.loads((folder / "trace.json").read_text())["traceEvents"]
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    assert any(name.startswith("target") for name in lanes)
    assert any(name.startswith("draft") for name in lanes)

    first = speeds(folder)
    ended = bench(folder, *GRID, "--repeats", "2", "--by-category", "--peer", "transformers", "--peer", "vllm")
    assert ended.code == 0, ended.err
    second = speeds(folder)
    assert first.items() <= second.items()
    wanted = {
        (system, batch_size, category, repeat)
        for system in ("plain", "ragged", "transformers")
        for batch_size in (1, 3)
        for category in (None, "a", "b")
        for repeat in range(2)
    }
    assert second.keys() == wanted
    content = json.loads((folder / "out.json").read_text())
    assert content["left_out"] == {"vllm": "no --vllm-python was given"}
    assert {cell["exact_match"] for cell in content["cells"]} == {1.0}
    assert len(content["commands"]) == 2

    # With everything there, nothing starts.
    before = (folder / "out.json").read_text()
    ended = bench(folder, *GRID, "--repeats", "2")
    assert ended.code == 0, ended.err
    assert "loading" not in ended.err
    assert (folder / "out.json").read_text() == before

    ended = bench(folder, *GRID, "--max-running", "9")
    assert ended.code == 2
    assert "settings window = None, not 9" in ended.err
