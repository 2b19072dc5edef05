"""Why a command ends early. Each message is one line that a user can act on."""

from __future__ import annotations


class UsageError(Exception):
    """The request of the user is not valid; the command ends with exit code 2."""


class RunError(Exception):
    """A valid command failed; it ends with exit code 1."""
