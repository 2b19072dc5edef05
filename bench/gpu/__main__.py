"""`python -m bench.gpu`: says in one sentence what is missing where it cannot start."""

import sys


def run() -> int:
    try:
        from bench.gpu.command import main
    except ModuleNotFoundError as error:
        name = _missing(error)
        reason = f"needs the Python package {name}, which is not installed here" if name else f"cannot start: {error}"
        print(f"bench.gpu {reason}.", file=sys.stderr)
        return 1
    return main()


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
