"""`python -m bench.gpu`: says in one sentence what is missing where it cannot start."""

import importlib
import sys

import bench.gpu

COMMANDS = {name: f"bench.gpu.{name}_command" for name in ("all", "compile", "exactness", "measure", "profile")}


def run() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        print(f"usage: python -m bench.gpu {{{','.join(COMMANDS)}}} ...\n\n{bench.gpu.__doc__}")
        return 0
    if name not in COMMANDS:
        print(f"bench.gpu: the command is {name!r}, must be one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        command = importlib.import_module(COMMANDS[name])
    except ModuleNotFoundError as error:
        package = _missing(error)
        reason = (
            f"needs the Python package {package}, which is not installed here" if package else f"cannot start: {error}"
        )
        print(f"bench.gpu {reason}.", file=sys.stderr)
        return 1
    found: int = command.main(sys.argv[2:])
    return found


def _missing(error: BaseException) -> str | None:
    """Libraries put errors of their own, without a name, around the one that has it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            return cause.name
        cause = cause.__cause__
    return None


if __name__ == "__main__":
    sys.exit(run())
