"""The command `spool`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from deploy.bench_command import bench_app
from deploy.command_options import takes_settings
from deploy.errors import RunError, UsageError
from deploy.kubernetes.command import k8s_app
from deploy.options import GenerateSettings, VerifySettings
from deploy.serving_commands import add_serving_commands

_USAGE, _FAILED, _INTERRUPTED = 2, 1, 130

app = typer.Typer(
    help="Serves large language models with batch speculative decoding, output exactly the target model's own.",
    add_completion=False,
)
models_app = typer.Typer(help="Models on this machine.")
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")
app.add_typer(k8s_app, name="k8s")


@app.command("generate")
@takes_settings(GenerateSettings)
def generate_command(settings: GenerateSettings) -> int:
    """Answers prompts, from a JSON lines file or built-in ones. Run again with the same --output to go on."""
    from deploy.generate import generate

    return generate(settings)


@app.command("verify")
@takes_settings(VerifySettings)
def verify_command(settings: VerifySettings) -> int:
    """Checks that speculation gives what plain decoding gives, token for token and logit for logit.

    Exit code 1 if it does not.
    """
    from deploy.verify import verify

    return verify(settings)


@models_app.command("fetch")
def fetch_command(
    name: Annotated[str, typer.Argument(help="`demo`, or the hub id of a model.")],
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")
    ] = False,
) -> int:
    """Downloads and prepares a model, so that later commands start at once."""
    from deploy.fetch import fetch_models

    folders = fetch_models(name)
    if json_output:
        print(json.dumps({"command": "models fetch", "folders": folders}), flush=True)
    return 0


add_serving_commands(app)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; what went wrong goes to standard error as one line."""
    command = typer.main.get_command(app)
    try:
        outcome = command.main(list(arguments) or ["--help"], prog_name="spool", standalone_mode=False)
    except (TyperException, UsageError) as error:
        return _complain(error.format_message() if isinstance(error, TyperException) else str(error), _USAGE)
    except RunError as error:
        return _complain(str(error), _FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        # Whoever read standard output has gone; the interpreter must not try to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    # Typer makes this of Ctrl-C, without a word.
    if outcome == _INTERRUPTED:
        return _complain("interrupted", _INTERRUPTED)
    return outcome if isinstance(outcome, int) else 0


def _complain(message: str, code: int) -> int:
    # "Value error" is how typer's validation introduces what is wrong.
    print(f"spool: {' '.join(message.replace('Value error, ', '').split())}", file=sys.stderr)
    return code


def main() -> None:
    sys.exit(run(sys.argv[1:]))
