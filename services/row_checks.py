"""What can be said of a protocol row without its sequence."""

from __future__ import annotations

from collections.abc import Iterable

from engine.description import EngineDescription
from protos import worker_pb2
from scheduler.messages import Role


def check_row(row: worker_pb2.Row, role: Role, engine: EngineDescription) -> None:
    """Raises ValueError naming field, value and limit. A vocabulary of size 0 accepts every token id."""
    if not row.tokens:
        raise ValueError("tokens is empty, must hold at least one token to feed")
    if role is Role.DRAFT:
        if row.draft_tokens or row.choose:
            raise ValueError("draft_tokens and choose are for target workers, this is a draft worker")
        behind = max(row.draft_length - 1, 0)
    else:
        if row.draft_length:
            raise ValueError(f"draft_length is {row.draft_length}, must be 0 on a target worker")
        if row.draft_tokens and not row.choose:
            raise ValueError("draft_tokens came without choose, nothing would verify them")
        behind = len(row.draft_tokens)
    most = engine.max_sequence_length
    length = row.kv_len + len(row.tokens) + behind
    if length > most:
        raise ValueError(f"the row would reach {length} tokens, must be at most {most}")
    _check_tokens("tokens", row.tokens, engine)
    if row.draft_tokens:
        _check_tokens("draft_tokens", row.draft_tokens, engine)
    if row.HasField("parameters") and (committed := row.parameters.committed_tokens):
        if len(committed) > most:
            raise ValueError(f"committed_tokens holds {len(committed)} tokens, must hold at most {most}")
        _check_tokens("committed_tokens", committed, engine)


def _check_tokens(name: str, tokens: Iterable[int], engine: EngineDescription) -> None:
    if engine.vocabulary_size and (largest := max(tokens)) >= engine.vocabulary_size:
        raise ValueError(f"{name} holds {largest}, must be below vocabulary_size {engine.vocabulary_size}")
