"""The command line `spool`, with all its commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer
from typer.exceptions import TyperException

from spool.deploy.cli.commands import add_commands
from spool.deploy.cli.overview import new_app
from spool.deploy.config.problems import ConfigurationError
from spool.deploy.errors import RunError, UsageError
from spool.deploy.kubernetes.command import k8s_app
from spool.engine.models.source import is_full

_USAGE, _FAILED, _INTERRUPTED = 2, 1, 130

app = new_app()
add_commands(app)
app.add_typer(k8s_app, name="k8s")


def run(arguments: Sequence[str], commands: typer.Typer = app, program: str = "spool") -> int:
    """Runs one command line and returns its exit code. Each error goes to standard error as one line."""
    command = typer.main.get_command(commands)
    try:
        outcome = command.main(list(arguments) or ["--help"], prog_name=program, standalone_mode=False)
    except TyperException as error:
        return _complain(error.format_message(), _USAGE)
    except ConfigurationError as error:
        return max(_complain(str(problem), _USAGE) for problem in error.problems)
    except UsageError as error:
        return _complain(str(error), _USAGE)
    except RunError as error:
        return _complain(str(error), _FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted", _INTERRUPTED)
    except typer.Abort as aborted:
        # Typer makes one of any EOFError, as if a person had ended the input.
        raise aborted.__cause__ or aborted from None
    except BrokenPipeError:
        # The reader of standard output has gone; the interpreter must not try to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except OSError as error:
        if not is_full(error):
            raise
        return _complain(
            f"{error.filename or 'the output'} cannot be written: {error.strerror} (free some space)", _FAILED
        )
    # Typer returns this code for Ctrl-C and prints nothing.
    if outcome == _INTERRUPTED:
        return _complain("interrupted", _INTERRUPTED)
    return outcome if isinstance(outcome, int) else 0


def _complain(message: str, code: int) -> int:
    # Typer puts "Value error" before the message of a failed validation.
    print(f"spool: {' '.join(message.replace('Value error, ', '').split())}", file=sys.stderr)
    return code
