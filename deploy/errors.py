"""Why a command ends early. Each message is one line that a user can act on."""

from __future__ import annotations

from spool.scheduler.errors import SpoolError


class UsageError(SpoolError):
    """The request of the user is not valid; the command ends with exit code 2."""


class RunError(SpoolError):
    """A valid command failed; it ends with exit code 1."""
