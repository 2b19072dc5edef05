"""What targets and draft workers hold each other to. Both ends know the limits, so a healthy peer never meets one."""

from __future__ import annotations

from spool.scheduler.errors import SpoolError

MAX_STREAMS = 256
"""Of one draft worker: the targets that it can serve."""
MAX_SEQUENCES = 4096
"""Of one stream."""
MAX_DRAFT_LENGTH = 64
"""Tokens of one proposal."""
MAX_GUESSES = 16
"""Proposals ahead of verdicts that a target keeps of a sequence; the oldest go first."""
MAX_OPENED_TOKENS = 1 << 20
"""Tokens of the sequences that one request opens, unless it opens a single one."""
MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Of one message on a stream. Sixteen times what `MAX_OPENED_TOKENS` take."""


class BadMessageError(SpoolError, ValueError):
    """A message that a healthy peer would not send: field, value and limit in words. `code` names a status of gRPC."""

    def __init__(self, message: str, code: str = "INVALID_ARGUMENT") -> None:
        super().__init__(message)
        self.code = code


def check_at_most(name: str, value: int, limit: int, code: str = "INVALID_ARGUMENT") -> None:
    """Raises BadMessageError."""
    if value > limit:
        raise BadMessageError(f"{name} is {value}, must be at most {limit}", code)
