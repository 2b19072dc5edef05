"""Snippets, requests and examples for clients do what the documents say, against a gateway with stand-in workers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spool.engine.models.loading import load_target_engine
from spool.engine.models.source import demo_chat_template
from spool.engine.settings import EngineSettings
from spool.services.gateway.settings import GatewaySettings
from spool.services.text.tokenizer import ModelTokenizer
from tests.docs.documents import COMMANDS, ROOT, Command, blocks_like
from tests.support.command_line import SPOOL, save_tokenizer
from tests.support.gateway import Gateways, Served, running_cell, stand_in_gateways
from tests.support.tiny_models import save_tiny_pair
from tests.support.waiting import LONG

EXAMPLES = ROOT / "docs" / "examples"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with stand_in_gateways(tmp_path_factory.mktemp("model"), step_seconds=0.002, unlucky=False) as gateways:
        tokenizer = ModelTokenizer(gateways.tokenizer.folder, demo_chat_template())
        with gateways.serve(GatewaySettings(model_names=("demo",)), tokenizer=tokenizer) as served:
            yield served


def here(text: str, served: Served) -> str:
    """For the ports of the test."""
    return text.replace("http://127.0.0.1:8000", served.url).replace("127.0.0.1:8001", served.address)


def run(served: Served, *words: str, folder: Path = ROOT) -> str:
    """What a Python program prints."""
    places = {"SPOOL_URL": served.url, "SPOOL_GRPC": served.address, "SPOOL_API_KEY": "none"}
    places["PATH"] = os.pathsep.join([str(SPOOL.parent), os.environ["PATH"]])
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | places, capture_output=True, text=True, timeout=4 * LONG, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("snippet", blocks_like(r"(import|from) "))
def test_snippets_run_and_say_something(snippet: str, served: Served) -> None:
    assert run(served, "-c", here(snippet, served)).strip()


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.words[0] == "curl"], ids=str)
def test_curl_is_answered(command: Command, served: Served) -> None:
    curl = shutil.which("curl") or pytest.skip("there is no curl here")
    words = [here(word, served) for word in command.words[1:]]
    done = subprocess.run([curl, "-sS", "--fail-with-body", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["object"]


def test_clients_report_the_tokens_of_an_answer(served: Served) -> None:
    assert re.search(r"\n[1-9]\d* tokens; of drafted ones accepted: ", run(served, str(EXAMPLES / "openai_client.py")))
    assert re.search(r"\n[1-9]\d* tokens; accepted ", run(served, str(EXAMPLES / "grpc_client.py")))


def test_a_batch_file_is_answered_in_its_order(served: Served, tmp_path: Path) -> None:
    prompts = [f"{number} bottles" for number in range(50)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    run(served, str(EXAMPLES / "batch_file.py"), "in.jsonl", "out.jsonl", folder=tmp_path)
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    assert all(answer["answer"] for answer in answers)


@pytest.mark.slow
def test_log_probabilities_of_rollouts_come_again_with_the_same_bits(tmp_path: Path) -> None:
    folder, _ = save_tiny_pair("llama", tmp_path)
    save_tokenizer(folder)
    settings = EngineSettings(str(folder), threads=1, page_size=16, kv_pages=200, max_num_batched_tokens=96)
    cell = running_cell(drafts=0, target=load_target_engine(settings, lambda *_: None))
    with Gateways(ModelTokenizer(folder), cell) as gateways, gateways.serve() as served:
        said = run(served, str(EXAMPLES / "rollout.py"), str(folder), folder=tmp_path)
    assert said.count("48 log probabilities, all equal\n") == 4, said
