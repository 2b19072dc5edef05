"""Links in the documents lead somewhere; every command and configuration is one that can be given."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer.main

from spool.deploy.config.loading import load_configuration
from spool.deploy.config.reference import reference
from tests.docs.documents import COMMANDS, DOCUMENTS, ROOT, Command, anchors, blocks_like, links, name_of

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


@documents
def test_links_lead_somewhere(document: Path) -> None:
    for link in links(document):
        if not link.startswith(("http://", "https://")):
            place, _, anchor = link.partition("#")
            target = (document.parent / place).resolve() if place else document
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


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
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words: tuple[str, ...], folder: Path) -> object:
    """What `spool` returns, or None: a module only has to read its arguments."""
    for word in words:
        if re.fullmatch(r"[\w/]+\.(jsonl|json|yaml)|[A-Z]+", word):
            (folder / word).parent.mkdir(parents=True, exist_ok=True)
            (folder / word).touch()
    if words[0] == "spool":
        return importlib.import_module("spool.deploy.cli.command_line").run(list(words[1:]))
    assert words[1] == "-m", words
    if words[2] == "pytest":
        return len([word for word in words if word.startswith("tests/") and not (ROOT / word).exists()])
    sys.argv = [words[2], *words[3:]]
    runpy.run_module(words[2], run_name="__main__")
    return "the module read no arguments"


def read(words: tuple[str, ...], folder: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as problems:
        try:
            code = run(words, folder)
        except Understood:
            return
        except SystemExit as end:
            code = end.code
    assert code == 0, problems.getvalue()


@of("spool", "python")
def test_programs_know_these_words(command: Command, only_read: Path) -> None:
    read(command.words, only_read)


@pytest.mark.parametrize("content", blocks_like(r"(# spool\.yaml|models:|groups:|auth:)"))
def test_configurations_are_right(content: str, tmp_path: Path) -> None:
    (tmp_path / "spool.yaml").write_text(content, encoding="utf-8")
    load_configuration(tmp_path / "spool.yaml", [])


def test_the_page_of_all_fields_is_what_the_program_prints() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == reference()
