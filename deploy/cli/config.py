"""`spool config`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.config.example import example_file, shown_value
from deploy.config.field_documents import documents
from deploy.config.loading import load_configuration
from deploy.config.problems import ConfigurationError
from deploy.config.reference import reference as configuration_reference
from deploy.config.spool_config import SpoolConfig
from deploy.ray_app import serve_options

_NARROWEST = 120
_WIDEST_DEFAULT = 11


def check(file: Path, overrides: list[str]) -> int:
    """Prints the problems, one line each, on standard output. Exit code 0 or 2."""
    try:
        load_configuration(file, overrides)
    except ConfigurationError as error:
        for problem in error.problems:
            print(problem)
        return 2
    print(f"{file}: right")
    return 0


def explain() -> None:
    """Prints every field with path, type, default and description."""
    width = None if sys.stdout.isatty() else _NARROWEST
    table = Table("field", "type", "default", "description", box=None, pad_edge=False, header_style="bold")
    for column, ratio in zip(table.columns, (None, 2, 1, 4), strict=True):
        column.ratio = ratio
        column.overflow = "fold"
    table.columns[0].no_wrap = True
    table.columns[2].min_width = _WIDEST_DEFAULT
    table.expand = True
    for document in documents(SpoolConfig, SpoolConfig()):
        if document.section:
            about = f"{document.description}" if document.optional else f"[bold]{document.description}[/bold]"
            default = r"\[]" if document.listed else "null" if document.optional else ""
            table.add_row(f"[bold]{document.name}[/bold]", document.type, default, about)
        else:
            default = "(required)" if document.required else shown_value(document.default)
            table.add_row(document.name, document.type, default.replace("[", r"\["), document.description)
    Console(width=width).print(table)


def serve_file(file: Path | None, overrides: list[str]) -> None:
    """Prints the file for `serve deploy`. Raises ConfigurationError."""
    print(serve_options.serve_file(load_configuration(file, overrides)), end="")


def reference() -> None:
    """Prints docs/configuration.md."""
    print(configuration_reference(), end="")


def example() -> None:
    """Prints a file with every field at its default."""
    print(example_file(), end="")
