"""What `spool --help` lists, apart from the commands: importing what their options are made of takes half a second."""

from __future__ import annotations

from typing import Annotated

import typer

_COMMANDS = {
    "serve": "Serves a model over OpenAI's HTTP API and gRPC, on a Ray of its own or on one that is running already.",
    "generate": "Answers prompts, from a JSON lines file or built-in ones.",
    "verify": "Checks that speculation gives what plain decoding gives, token for token and logit for logit.",
    "replay": "Computes the output of receipts again, and compares it bit by bit.",
    "chat": "Talks to a running server in the terminal.",
    "status": "Shows replicas, workers, sequences and groups of the served application.",
    "logs": "Prints the logs of gateways, scheduler and workers on this machine.",
    "down": "Stops what `spool serve` started, and nothing else.",
    "models": "Models on this machine.",
    "config": "The configuration file: show, explain it, render it for Ray.",
    "k8s": "Kubernetes: manifests from a configuration, and what their pods run.",
}


def new_app() -> typer.Typer:
    """Without commands."""
    # Tables of rich's cut the names of options in narrow terminals.
    app = typer.Typer(rich_markup_mode=None)

    @app.callback()
    def spool(
        version: Annotated[
            bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
        ] = False,
    ) -> None:
        """Serves large language models with batch speculative decoding, output exactly the target model's own."""

    return app


def show(option: str) -> None:
    """Prints what `--help` or `--version` asks for."""
    app = new_app()
    for name, help_text in _COMMANDS.items():
        app.command(name, help=help_text)(lambda: None)
    typer.main.get_command(app).main([option], prog_name="spool", standalone_mode=False)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib import metadata

        print(f"spool {metadata.version('spool-serve')}")
        raise typer.Exit
