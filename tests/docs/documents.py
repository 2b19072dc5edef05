"""The project's documents, taken apart: links, commands, snippets."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("k8s/**/*.md")])

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^|\n\n)((?:    .*\n|\n(?=    ))+)")
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_PROGRAMS = ("spool", "python", "make", "curl", "kubectl")


@dataclass(frozen=True)
class Command:
    """`words` without the folder of the virtual environment; `shown` as it stands in the document."""

    document: str
    shown: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}: {self.shown}"


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def blocks(document: Path) -> Iterator[str]:
    """Code blocks, without their indentation."""
    text = document.read_text(encoding="utf-8")
    for _, block in _FENCE.findall(text):
        yield block
    for block in _INDENTED.findall(_FENCE.sub("", text)):
        yield textwrap.dedent(block)


def commands(document: Path) -> Iterator[Command]:
    """Those in code blocks, and those in running text that have arguments or name a program of ours."""
    lines = [line for block in blocks(document) for line in block.replace("\\\n", " ").splitlines()]
    text = _FENCE.sub("", document.read_text(encoding="utf-8"))
    for shown in [*lines, *_INLINE.findall(text)]:
        try:
            words = shlex.split(shown, comments=True)
        except ValueError:
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if len(words) > 1 and (program := words[0].removeprefix(".venv/bin/")) in _PROGRAMS:
            # A module that is only named may need arguments.
            named_only = shown not in lines and len(words) == 3 and words[1] == "-m"
            yield Command(name_of(document), shown.strip(), (program, *words[1:], *(["--help"] if named_only else [])))


def links(document: Path) -> list[str]:
    return _LINK.findall(_FENCE.sub("", document.read_text(encoding="utf-8")))


def named_files(document: Path) -> Iterator[str]:
    """Paths in running text that look like files of the project."""
    for shown in _INLINE.findall(_FENCE.sub("", document.read_text(encoding="utf-8"))):
        if re.fullmatch(r"(?:bench|deploy|docs|engine|k8s|protos|scheduler|services|tests)/[\w./-]+", shown):
            yield shown


def anchors(document: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = _HEADING.findall(_FENCE.sub("", document.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
