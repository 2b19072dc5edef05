"""Options that several commands take in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_DEFAULT_FILE = Path("spool.yaml")

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Configuration file.", show_default="./spool.yaml, if there is one"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, as in scheduling.batch_size=16; repeatable."),
]
App = Annotated[str, typer.Option("--app", help="Name of the application (ray.app_name).")]


def chosen_file(file: Path | None) -> Path | None:
    """`file` itself, or else `spool.yaml` in the working directory if there is one."""
    if file is not None:
        return file
    return _DEFAULT_FILE if _DEFAULT_FILE.is_file() else None
