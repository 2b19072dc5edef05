"""`spool config`."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from deploy.config.example import example_file, shown_value
from deploy.config.field_documents import documents
from deploy.config.loading import load_configuration
from deploy.config.problems import ConfigurationError
from deploy.config.reference import reference as configuration_reference
from deploy.config.spool_config import SpoolConfig
from deploy.errors import UsageError
from deploy.ray_app import serve_options

_NARROWEST = 120
_WIDEST_DEFAULT = 11


def show(file: Path | None, overrides: list[str]) -> None:
    """Prints the configuration that a file and overrides make, as YAML. Raises ConfigurationError."""
    print(yaml.safe_dump(load_configuration(file, overrides).dump(), sort_keys=False), end="")


def check(file: Path | None, overrides: list[str]) -> int:
    """Prints the problems, one line each, on standard output. Exit code 0 or 2. Raises UsageError without a file."""
    if file is None:
        raise UsageError("no file is given, and there is no spool.yaml here")
    try:
        load_configuration(file, overrides)
    except ConfigurationError as error:
        for problem in error.problems:
            print(problem)
        return 2
    print(f"{file}: right")
    return 0


def explain(field: str | None) -> None:
    """Prints path, type, default and description of every field, of one field, or of a section's.

    Raises UsageError for a field that is not there.
    """
    found = list(documents(SpoolConfig, SpoolConfig()))
    if field is not None:
        names = [document.name for document in found]
        found = [document for document in found if document.name == field or document.name.startswith(f"{field}.")]
        if not found:
            near = difflib.get_close_matches(field, names, n=1)
            raise UsageError(f"{field} is no field of Spool{f'; did you mean {near[0]}?' if near else ''}")
    width = None if sys.stdout.isatty() else _NARROWEST
    table = Table("field", "type", "default", "description", box=None, pad_edge=False, header_style="bold")
    for column, ratio in zip(table.columns, (None, 2, 1, 4), strict=True):
        column.ratio = ratio
        column.overflow = "fold"
    table.columns[0].no_wrap = True
    table.columns[2].min_width = _WIDEST_DEFAULT
    table.expand = True
    for document in found:
        if document.section:
            about = f"{document.description}" if document.optional else f"[bold]{document.description}[/bold]"
            default = r"\[]" if document.listed else "null" if document.optional else ""
            table.add_row(f"[bold]{document.name}[/bold]", document.type, default, about)
        else:
            default = "(required)" if document.required else shown_value(document.default)
            table.add_row(document.name, document.type, default.replace("[", r"\["), document.description)
    Console(width=width).print(table)


def render(file: Path | None, overrides: list[str]) -> None:
    """Prints the file for `serve deploy`. Raises ConfigurationError."""
    print(serve_options.serve_file(load_configuration(file, overrides)), end="")


def reference() -> None:
    """Prints docs/configuration.md."""
    print(configuration_reference(), end="")


def show_defaults() -> None:
    """Prints a file with every field at its default."""
    print(example_file(), end="")
