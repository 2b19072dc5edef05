"""Answers to rows that follow others, in columns: most rows of a busy worker are such, and a message for each would
cost more than all else on their way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from protos import worker_pb2
from scheduler.messages import Outcome, Row, RowResult, RowStatus

Followed: TypeAlias = tuple[int, Sequence[int], Sequence[int], Sequence[int]]
"""What became of a row: the positions that its sequence has KV of now, the tokens, a digest of the logits of each of
them or nothing, and what the target's own draft has proposed after them."""


def followed_to_wire(followed: Sequence[Followed | None]) -> worker_pb2.FollowedRows:
    """None stands for a row that has a reply of its own."""
    counts, tokens, kv_lens, digests, proposed, proposals = (list[int]() for _ in range(6))
    for one in followed:
        if one is None:
            counts.append(0)
            continue
        kv_len, of_row, of_logits, proposal = one
        counts.append(len(of_row))
        tokens += of_row
        kv_lens.append(kv_len)
        digests += of_logits or [0] * len(of_row)
        proposed.append(len(proposal))
        proposals += proposal
    columns = worker_pb2.FollowedRows(counts=counts, tokens=tokens, kv_lens=kv_lens)
    if any(digests):
        columns.logits_digests.extend(digests)
    if proposals:
        columns.proposed.extend(proposed)
        columns.proposed_tokens.extend(proposals)
    return columns


def followed_from_wire(rows: Sequence[Row], followed: worker_pb2.FollowedRows) -> list[RowResult | None]:
    """The results of these rows, in their order; None for one that has a reply of its own. Raises ValueError naming a
    column that is too long or too short."""
    counts, tokens, kv_lens = list(followed.counts), tuple(followed.tokens), list(followed.kv_lens)
    told = sum(map(bool, counts))
    digests = tuple(followed.logits_digests) or (0,) * len(tokens)
    proposed, proposals = list(followed.proposed) or [0] * told, tuple(followed.proposed_tokens)
    columns = {
        "counts": (counts, len(rows)),
        "tokens": (tokens, sum(counts)),
        "kv_lens": (kv_lens, told),
        "logits_digests": (digests, len(tokens)),
        "proposed": (proposed, told),
        "proposed_tokens": (proposals, sum(proposed)),
    }
    for name, (column, size) in columns.items():
        if len(column) != size:
            raise ValueError(f"followed.{name} holds {len(column)} entries, must hold {size}")
    results = list[RowResult | None]()
    of_told = zip(kv_lens, proposed, strict=True)
    begin = first = 0
    for row, count in zip(rows, counts, strict=True):
        if not count:
            results.append(None)
            continue
        kv_len, length = next(of_told)
        end, last = begin + count, first + length
        result = RowResult(row.sequence_id, RowStatus.OK, kv_len, 0, tokens[begin:end], count - 1)
        if digests[begin]:
            result.logits_digests = digests[begin:end]
        if length:
            result.outcomes = (Outcome(count - 1, tokens[end - 1], proposals[first:last]),)
        results.append(result)
        begin, first = end, last
    return results
