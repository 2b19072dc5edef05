"""Commands of the served application: `config`, `serve`, `status`, `chat`, `down`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.configuration.loading import DEFAULT_FILE
from deploy.errors import UsageError

_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, as in scheduling.batch_size=16; repeatable."),
]


def add_serving_commands(app: typer.Typer) -> None:
    """Adds them to the command line."""
    app.command("config")(config_command)


def config_command(
    check: Annotated[Path | None, typer.Option(help="Say what is wrong with a file, with line and field.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="List every field.")] = False,
    example: Annotated[bool, typer.Option("--example", help="Print a file with every field at its default.")] = False,
    overrides: _Set = None,
) -> int:
    """The configuration file: list its fields, print an example, check one."""
    from deploy import config_command

    if [check is not None, explain, example].count(True) != 1:
        raise UsageError("config needs one of --check FILE, --explain and --example")
    if check is not None:
        return config_command.check(check, overrides or [])
    if explain:
        config_command.explain()
    else:
        config_command.example()
    return 0


def chosen_file(file: Path | None) -> Path | None:
    """The file asked for, or `spool.yaml` in the working directory where there is one."""
    if file is not None:
        return file
    return DEFAULT_FILE if DEFAULT_FILE.is_file() else None
