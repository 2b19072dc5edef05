"""The group `spool config`; function bodies import what they need, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.shared_options import Overrides, chosen_file

config_app = typer.Typer(help="The configuration file: show, check, explain it, render it for Ray.")

_File = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="Configuration file.", show_default="./spool.yaml, if there is one"),
]


@config_app.command("show")
def show_command(
    file: _File = None,
    overrides: Overrides = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Print a file with every field at its default, and its description.")
    ] = False,
) -> int:
    """Prints every field with the value that holds, secrets hidden."""
    from deploy.cli import config

    if defaults:
        config.show_defaults()
    else:
        config.show(chosen_file(file), overrides or [])
    return 0


@config_app.command("check")
def check_command(file: _File = None, overrides: Overrides = None) -> int:
    """Lists what is wrong with a file, with line and field. Exit code 2 if something is."""
    from deploy.cli import config

    return config.check(chosen_file(file), overrides or [])


@config_app.command("explain")
def explain_command(
    field: Annotated[
        str | None,
        typer.Argument(metavar="FIELD", help="A field or section, such as engine.", show_default="all"),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/configuration.md.")] = False,
) -> int:
    """Says what fields mean: type, default and description."""
    from deploy.cli import config

    if markdown:
        config.reference()
    else:
        config.explain(field)
    return 0


@config_app.command("render")
def render_command(file: _File = None, overrides: Overrides = None) -> int:
    """Prints the file for Ray's `serve deploy`, with the secrets in it."""
    from deploy.cli import config

    config.render(chosen_file(file), overrides or [])
    return 0
