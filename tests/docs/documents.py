"""The project's documents, taken apart: links, commands, snippets."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("k8s/**/*.md")])

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^|\n\n)((?:    .*\n|\n(?=    ))+)")
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_PROGRAMS = ("spool", "python", "make", "curl", "kubectl")


class Command(NamedTuple):
    """`words` without the folder of the virtual environment."""

    document: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}: {shlex.join(self.words)}"


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def prose(document: Path) -> str:
    return _FENCE.sub("", document.read_text(encoding="utf-8"))


def blocks(document: Path) -> list[str]:
    """Code blocks, without their indentation."""
    fenced = [block for _, block in _FENCE.findall(document.read_text(encoding="utf-8"))]
    return fenced + [textwrap.dedent(block) for block in _INDENTED.findall(prose(document))]


def blocks_like(beginning: str) -> Any:
    """Parameters of a test: the code blocks of all documents that begin with this pattern."""
    found = [(name_of(document), block) for document in DOCUMENTS for block in blocks(document)]
    return [pytest.param(block, id=name) for name, block in found if re.match(beginning, block)]


def commands(document: Path) -> Iterator[Command]:
    """Those in code blocks, and those in running text that have arguments."""
    lines = [line for block in blocks(document) for line in block.replace("\\\n", " ").splitlines()]
    for shown in [*lines, *_INLINE.findall(prose(document))]:
        try:
            words = shlex.split(shown, comments=True)
        except ValueError:
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if len(words) > 1 and (program := words[0].removeprefix(".venv/bin/")) in _PROGRAMS:
            yield Command(name_of(document), (program, *words[1:]))


def links(document: Path) -> list[str]:
    return _LINK.findall(prose(document))


def anchors(document: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = _HEADING.findall(prose(document))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


COMMANDS = list({command.words: command for document in DOCUMENTS for command in commands(document)}.values())
