"""What targets and draft workers hold each other to. Both ends know the limits, so a healthy peer never meets one."""

from __future__ import annotations

from collections.abc import Sequence

MAX_STREAMS = 256
"""Of one draft worker: the targets that it can serve."""
MAX_SEQUENCES = 4096
"""Of one stream."""
MAX_DRAFT_LENGTH = 64
"""Tokens of one proposal."""
MAX_OPENED_TOKENS = 1 << 20
"""Tokens of the sequences that one request opens, unless it opens a single one."""
MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Of one message on a stream. Sixteen times what `MAX_OPENED_TOKENS` take."""


class BadMessageError(ValueError):
    """A message that a healthy peer would not send: field, value and limit in words. `code` names a status of gRPC."""

    def __init__(self, message: str, code: str = "INVALID_ARGUMENT") -> None:
        super().__init__(message)
        self.code = code


def check_columns(first: str, size: int, columns: Sequence[tuple[str, int]]) -> None:
    """`columns` are the others' names and sizes. Raises BadMessageError."""
    for name, found in columns:
        if found != size:
            raise BadMessageError(f"{name} has {found} entries, must have {size} as {first} has")


def check_counts(counts: Sequence[int], tokens: int) -> None:
    """Raises BadMessageError."""
    if (total := sum(counts)) != tokens:
        raise BadMessageError(f"tokens has {tokens} entries, must have {total} as counts says")


def check_tokens(name: str, tokens: Sequence[int], vocabulary_size: int) -> None:
    """A `vocabulary_size` of 0 admits all ids. Raises BadMessageError."""
    if vocabulary_size and tokens and (largest := max(tokens)) >= vocabulary_size:
        raise BadMessageError(f"{name} holds {largest}, must be below vocabulary_size {vocabulary_size}")


def check_at_most(name: str, value: int, limit: int, code: str = "INVALID_ARGUMENT") -> None:
    """Raises BadMessageError."""
    if value > limit:
        raise BadMessageError(f"{name} is {value}, must be at most {limit}", code)
