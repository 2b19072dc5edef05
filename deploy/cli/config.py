"""`spool config`. Function bodies import what they need, so that `--help` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.errors import UsageError

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
    return _DEFAULT_FILE if _DEFAULT_FILE.is_file() else None


@config_app.command("show")
def show(
    file: _File = None,
    overrides: Overrides = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Print a file with every field at its default, and its description.")
    ] = False,
) -> None:
    """Prints every field with the value that holds, secrets hidden."""
    import yaml

    from deploy.config.loading import load_configuration
    from deploy.config.reference import example_file

    if defaults:
        text = example_file()
    else:
        text = yaml.safe_dump(load_configuration(chosen_file(file), overrides or []).dump(), sort_keys=False)
    print(text, end="")


@config_app.command("explain")
def explain(
    field: Annotated[
        str | None,
        typer.Argument(metavar="FIELD", help="A field or section, such as engine.", show_default="all"),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/configuration.md.")] = False,
) -> None:
    """Says what fields mean: type, default and description."""
    from deploy.config.reference import documents, reference

    if markdown:
        print(reference(), end="")
        return
    found = [one for one in documents() if field is None or one.name == field or one.name.startswith(f"{field}.")]
    if not found:
        raise UsageError(f"{field} is no field of Spool (`spool config explain` lists them)")
    for one in found:
        value = "" if one.is_section else f" ({one.type}; {one.default})"
        print(f"{one.name}{value}: {one.description}")


@config_app.command("render")
def render(file: _File = None, overrides: Overrides = None) -> None:
    """Prints the file for Ray's `serve deploy`, with the secrets in it."""
    from deploy.config.loading import load_configuration
    from deploy.ray_app.serve_options import serve_file

    print(serve_file(load_configuration(chosen_file(file), overrides or [])), end="")
