"""Why a command ends early. Each message is one line that a user can act on."""

from __future__ import annotations


class UsageError(Exception):
    """The user asked for something that cannot be; the command ends with exit code 2."""


class RunError(Exception):
    """Something failed on the way; the command ends with exit code 1."""
