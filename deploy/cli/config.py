"""`spool config`. Function bodies import what they need, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from spool.deploy.config.loading import GivenValue, load_configuration
from spool.deploy.config.spool_config import SpoolConfig

config_app = typer.Typer(help="The configuration file: show, explain it, render it for Ray.")

_DEFAULT_FILE = Path("spool.yaml")

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, as in scheduling.batch_size=16; repeatable."),
]
_File = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="Configuration file.", show_default="./spool.yaml, if there is one"),
]


def chosen_file(file: Path | None) -> Path | None:
    """`file` itself, or else `spool.yaml` in the working directory if there is one."""
    if file is not None:
        return file
    # Also one that cannot be read, as a link to nothing: loading says so.
    return _DEFAULT_FILE if os.path.lexists(_DEFAULT_FILE) else None


def loaded(file: Path | None, overrides: Sequence[str] | None, given: Sequence[GivenValue] = ()) -> SpoolConfig:
    """The configuration in a file or in `spool.yaml`. Warns of fields that do nothing. Raises ConfigurationError."""
    config = load_configuration(chosen_file(file), overrides or (), given)
    for field in config.without_effect():
        print(f"spool: warning: {field} has no effect any more: leave it out", file=sys.stderr)
    return config


@config_app.command("show")
def show(file: _File = None, overrides: Overrides = None) -> None:
    """Prints every field with the value that holds, secrets hidden; and to standard error, which files are not here."""
    import yaml

    from spool.deploy.config.files import absent_files

    config = loaded(file, overrides)
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
    for warning in absent_files(config):
        print(f"spool: warning: {warning}", file=sys.stderr)


@config_app.command("explain")
def explain() -> None:
    """Prints docs/configuration.md: type, default and description of every field."""
    from spool.deploy.config.reference import reference

    print(reference(), end="")


@config_app.command("render")
def render(file: _File = None, overrides: Overrides = None) -> None:
    """Prints the file for Ray's `serve deploy`, with the secrets in it."""
    from spool.deploy.ray_app.serve_options import serve_file

    config = loaded(file, overrides)
    for field in config.secret_fields:
        print(f"spool: warning: {field} is among what is printed: keep it from others", file=sys.stderr)
    print(serve_file(config), end="")
