"""Commands of the served application: `config`, `serve`, `status`, `chat`, `down`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.configuration.loading import DEFAULT_FILE
from deploy.errors import UsageError

_File = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration.", show_default="spool.yaml here, if there is one")
]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, as in scheduling.batch_size=16; repeatable."),
]
_App = Annotated[str, typer.Option("--app", help="Name of the application (ray.app_name).")]


def add_serving_commands(app: typer.Typer) -> None:
    """Adds them to the command line."""
    for name, command in (
        ("serve", serve_command),
        ("status", status_command),
        ("chat", chat_command),
        ("down", down_command),
        ("config", config_command),
    ):
        app.command(name)(command)


def serve_command(
    config: _File = None,
    overrides: _Set = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave it running and return.")] = False,
) -> int:
    """Serves the models over OpenAI's HTTP API and gRPC, on a Ray of its own or on one that is there."""
    from deploy.serve_command import serve_application

    return serve_application(chosen_file(config), overrides or [], detach)


def status_command(
    app: _App = "spool",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Shows replicas, workers, pool and groups of what is served."""
    from deploy.status_command import status

    return status(app, json_output)


def chat_command(
    app: _App = "spool",
    url: Annotated[str | None, typer.Option(help="Address of the server, as http://127.0.0.1:8000.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to talk to.", show_default="the server's")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key to show.", show_default="$SPOOL_API_KEY")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the first question.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default="the server's")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer at most.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
) -> int:
    """Talks to a running server in the terminal."""
    from deploy.chat_command import ChatOptions, chat

    return chat(ChatOptions(app, url, model, api_key, system, temperature, max_tokens, seed))


def down_command(app: _App = "spool") -> int:
    """Stops what `spool serve` started, and nothing else."""
    from deploy.status_command import down

    return down(app)


def config_command(
    check: Annotated[Path | None, typer.Option(help="Say what is wrong with a file, with line and field.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="List every field.")] = False,
    example: Annotated[bool, typer.Option("--example", help="Print a file with every field at its default.")] = False,
    reference: Annotated[bool, typer.Option("--reference", help="Print every field as Markdown.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Print the file for Ray's `serve deploy`, with the secrets in it.")
    ] = False,
    config: _File = None,
    overrides: _Set = None,
) -> int:
    """The configuration file: list its fields, print an example, check one, make Ray Serve's from it."""
    from deploy import config_command

    if [check is not None, explain, example, reference, serve].count(True) != 1:
        raise UsageError("config needs one of --check FILE, --explain, --example, --reference and --serve")
    if check is not None:
        return config_command.check(check, overrides or [])
    if explain:
        config_command.explain()
    elif example:
        config_command.example()
    elif reference:
        config_command.reference()
    else:
        config_command.serve_file(chosen_file(config), overrides or [])
    return 0


def chosen_file(file: Path | None) -> Path | None:
    """The file asked for, or `spool.yaml` in the working directory where there is one."""
    if file is not None:
        return file
    return DEFAULT_FILE if DEFAULT_FILE.is_file() else None
