"""The command `spool`, from its first import on."""

from __future__ import annotations

import os
import signal
import sys
from io import TextIOWrapper
from types import FrameType

_INTERRUPTED = 130


def main() -> None:
    handler = signal.getsignal(signal.SIGINT)
    # Modules that are being imported may swallow KeyboardInterrupt, or print it; until a command runs, nothing is open.
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_at_once)
    # A shell that completes words asks by this variable.
    if sys.argv[1:] in ([], ["--help"], ["--version"]) and "_SPOOL_COMPLETE" not in os.environ:
        from spool.deploy.cli.overview import show

        show((sys.argv[1:] or ["--help"])[0])
        return
    from spool.deploy.cli.command_line import run

    signal.signal(signal.SIGINT, handler)
    if isinstance(sys.stdout, TextIOWrapper):
        # Not every terminal can show every text.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
