"""Every command in the documents is one that can be given; the snippets for clients are run."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer.main

from deploy.config.loading import load_configuration
from deploy.config.reference import reference
from engine.models.source import demo_chat_template
from services.gateway.settings import GatewaySettings
from services.text.tokenizer import ModelTokenizer
from tests.docs.documents import DOCUMENTS, ROOT, Command, blocks, commands, name_of
from tests.support.gateway import Gateways, Served, stand_in_gateways
from tests.support.waiting import LONG

COMMANDS = list({command.words: command for document in DOCUMENTS for command in commands(document)}.values())


def of(*programs: str) -> Any:
    return pytest.mark.parametrize("command", [each for each in COMMANDS if each.words[0] in programs], ids=str)


class Understood(BaseException):
    """The command line was read to its end."""


@pytest.fixture
def only_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Command lines are read and not carried out, in a folder in which all files that they name exist."""

    def stop(command: Any, context: Any) -> None:
        if not hasattr(command, "commands"):  # a group comes here before it reads on
            raise Understood

    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(*arguments: Any, **named: Any) -> NoReturn:
        parse(*arguments, **named)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    for kind in typer.main.get_command(typer.Typer(callback=lambda: None)).__class__.__mro__:
        if kind.__name__ == "Command":
            monkeypatch.setattr(kind, "invoke", stop)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(words: tuple[str, ...], folder: Path) -> None:
    for word in words:
        if re.fullmatch(r"[\w/]+\.(jsonl|json|yaml)|[A-Z]+", word):
            (folder / word).parent.mkdir(parents=True, exist_ok=True)
            (folder / word).touch()
    problems = io.StringIO()
    code: object = "nothing was read"
    try:
        with contextlib.redirect_stderr(problems):
            code = run(words)
    except Understood:
        return
    except SystemExit as end:
        code = end.code
    assert code == 0, problems.getvalue()


def run(words: tuple[str, ...]) -> object:
    if words[0] == "spool":
        return importlib.import_module("deploy.cli.main").run(list(words[1:]))
    assert words[1] == "-m", words
    if words[2] == "pytest":
        return len([word for word in words if word.startswith("tests/") and not (ROOT / word).exists()])
    before, sys.argv = sys.argv, [words[2], *words[3:]]
    try:
        return runpy.run_module(words[2], run_name="__main__")
    finally:
        sys.argv = before


@of("spool", "python")
def test_programs_know_these_words(command: Command, only_read: Path) -> None:
    read(command.words, only_read)


def test_unknown_words_would_be_seen(only_read: Path) -> None:
    for words in ("spool serve --nothing", "spool nothing", "python -m bench.gpu --nothing", "spool status 1 2 3"):
        with pytest.raises(AssertionError):
            read(tuple(words.split()), only_read)


@of("make")
def test_targets_exist(command: Command) -> None:
    done = subprocess.run(["make", "-n", *command.words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@of("kubectl")
def test_kubectl_finds_what_it_is_given(command: Command) -> None:
    assert missing(command.words) == []


def missing(words: Iterable[str]) -> list[str]:
    """Paths of the project that are not there; of what `kubectl` is given, only those are known here."""
    return [word for word in words if word.startswith("k8s/") and not (ROOT / word).exists()]


def test_missing_folders_would_be_seen() -> None:
    """And the documents name folders of the project, so that the test above has something to look for."""
    assert missing(["kubectl", "apply", "-k", "k8s/overlays/cpu-demo", "k8s/nowhere"]) == ["k8s/nowhere"]
    named = {word for command in COMMANDS if command.words[0] == "kubectl" for word in command.words}
    assert any(word.startswith("k8s/") for word in named)


CONFIGURATIONS = [
    (name_of(document), block)
    for document in DOCUMENTS
    for block in blocks(document)
    if re.match(r"(# spool\.yaml|models:|groups:)", block)
]


@pytest.mark.parametrize(("document", "content"), CONFIGURATIONS)
def test_configurations_are_right(document: str, content: str, tmp_path: Path) -> None:
    file = tmp_path / "spool.yaml"
    file.write_text(content, encoding="utf-8")
    load_configuration(file, [])


def test_the_page_of_all_fields_is_what_the_program_prints() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == reference()


# --- clients ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    gateways = stand_in_gateways(tmp_path_factory.mktemp("model"), unlucky=False)
    yield gateways
    gateways.close()


@pytest.fixture(scope="module")
def served(gateways: Gateways) -> Iterator[Served]:
    tokenizer = ModelTokenizer(gateways.tokenizer.folder, demo_chat_template())
    with gateways.serve(GatewaySettings(model_names=("demo",)), tokenizer=tokenizer) as served:
        yield served


def here(text: str, served: Served) -> str:
    """For the ports of the test."""
    return text.replace("http://127.0.0.1:8000", served.url).replace("127.0.0.1:8001", served.address)


SNIPPETS = [
    (document.name, block) for document in DOCUMENTS for block in blocks(document) if re.match(r"(import|from) ", block)
]


@pytest.mark.parametrize(("document", "snippet"), SNIPPETS)
def test_snippets_run_and_say_something(document: str, snippet: str, served: Served) -> None:
    done = subprocess.run(
        [sys.executable, "-c", here(snippet, served)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@of("curl")
def test_curl_is_answered(command: Command, served: Served) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("there is no curl here")
    words = [here(word, served) for word in command.words[1:]]
    done = subprocess.run([curl, "-sS", "--fail-with-body", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if "/v1/" in command.shown:
        assert json.loads(done.stdout)["object"]
