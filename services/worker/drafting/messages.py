"""Requests to draft workers and their proposals, checked and as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from protos import draft_pb2, worker_pb2
from scheduler.sampling import SamplingParameters
from services.rpc.conversion import from_wire, to_wire
from services.worker.drafting.limits import (
    MAX_DRAFT_LENGTH,
    MAX_SEQUENCES,
    BadMessageError,
    check_at_most,
    check_columns,
    check_counts,
    check_tokens,
)

_SCOPE_SIZES = (0, 32)


@dataclass(slots=True)
class Opened:
    """What a draft must know of a sequence besides its tokens, and the first of these."""

    prompt_length: int
    sampling: SamplingParameters
    cache_scope: bytes
    tokens: Sequence[int]


@dataclass(slots=True)
class Verdict:
    """A sequence is truncated to `length` - `len(tokens)` tokens, `tokens` follow, and all have this `digest` then.
    `draft_length` tokens are to be proposed after them; 0: only KV is computed. `opened`: the draft did not know it."""

    sequence_id: int
    length: int
    digest: int
    tokens: Sequence[int]
    draft_length: int
    opened: Opened | None = None


@dataclass(slots=True)
class VerdictsOfStep:
    round: int
    closed_ids: Sequence[int] = ()
    verdicts: list[Verdict] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """What is proposed after the prefix with this `digest`; without tokens: nothing is."""

    sequence_id: int
    digest: int
    tokens: Sequence[int]


def verdicts_to_wire(step: VerdictsOfStep) -> draft_pb2.DraftRequest:
    verdicts = step.verdicts
    return draft_pb2.DraftRequest(
        round=step.round,
        closed_ids=step.closed_ids,
        sequences=[_opened_to_wire(one.sequence_id, one.opened) for one in verdicts if one.opened is not None],
        sequence_ids=[one.sequence_id for one in verdicts],
        lengths=[one.length for one in verdicts],
        digests=[one.digest for one in verdicts],
        counts=[len(one.tokens) for one in verdicts],
        tokens=[token for one in verdicts for token in one.tokens],
        draft_lengths=[one.draft_length for one in verdicts],
    )


def verdicts_from_wire(request: draft_pb2.DraftRequest, vocabulary_size: int) -> VerdictsOfStep:
    """Raises BadMessageError."""
    ids, counts = request.sequence_ids, request.counts
    check_columns(
        "sequence_ids",
        len(ids),
        [(name, len(getattr(request, name))) for name in ("lengths", "digests", "counts", "draft_lengths")],
    )
    check_at_most("the number of sequence_ids", len(ids), MAX_SEQUENCES, "RESOURCE_EXHAUSTED")
    check_at_most("the number of closed_ids", len(request.closed_ids), MAX_SEQUENCES, "RESOURCE_EXHAUSTED")
    check_counts(counts, len(request.tokens))
    check_tokens("tokens", request.tokens, vocabulary_size)
    if len(set(ids)) < len(ids):
        raise BadMessageError("sequence_ids holds an id twice, must hold each once")
    opened = {one.sequence_id: _opened_from_wire(one.parameters, vocabulary_size) for one in request.sequences}
    if len(opened) < len(request.sequences) or not opened.keys() <= set(ids):
        raise BadMessageError("sequences holds an id that is not in sequence_ids, or one twice, must hold each once")
    step = VerdictsOfStep(request.round, list(request.closed_ids))
    columns = zip(
        *(ids, request.lengths, request.digests, _parts(request.tokens, counts), request.draft_lengths), strict=True
    )
    for sequence_id, length, digest, tokens, draft_length in columns:
        if length < (least := max(len(tokens), 1)):
            raise BadMessageError(f"lengths holds {length}, must be at least {least}, as its entry of counts says")
        check_at_most("an entry of draft_lengths", draft_length, MAX_DRAFT_LENGTH)
        if sequence_id in opened:
            check_at_most("the number of committed_tokens", len(opened[sequence_id].tokens), length)
        step.verdicts.append(Verdict(sequence_id, length, digest, tokens, draft_length, opened.get(sequence_id)))
    return step


def answers_to_wire(answers: Sequence[Answer]) -> draft_pb2.Proposals:
    return draft_pb2.Proposals(
        sequence_ids=[one.sequence_id for one in answers],
        digests=[one.digest for one in answers],
        counts=[len(one.tokens) for one in answers],
        tokens=[token for one in answers for token in one.tokens],
    )


def answers_from_wire(proposals: draft_pb2.Proposals, vocabulary_size: int) -> list[Answer]:
    """Raises BadMessageError."""
    ids, counts = proposals.sequence_ids, proposals.counts
    check_columns("sequence_ids", len(ids), [("digests", len(proposals.digests)), ("counts", len(counts))])
    check_counts(counts, len(proposals.tokens))
    check_tokens("tokens", proposals.tokens, vocabulary_size)
    columns = zip(ids, proposals.digests, _parts(proposals.tokens, counts), strict=True)
    return [Answer(*one) for one in columns]


def _opened_to_wire(sequence_id: int, opened: Opened) -> draft_pb2.DraftSequence:
    parameters = to_wire(worker_pb2.SequenceParameters, opened, committed_tokens=opened.tokens)
    return draft_pb2.DraftSequence(sequence_id=sequence_id, parameters=parameters)


def _opened_from_wire(parameters: worker_pb2.SequenceParameters, vocabulary_size: int) -> Opened:
    check_tokens("committed_tokens", parameters.committed_tokens, vocabulary_size)
    if len(parameters.cache_scope) not in _SCOPE_SIZES:
        raise BadMessageError(f"cache_scope has {len(parameters.cache_scope)} bytes, must have none or 32")
    try:
        given = parameters.HasField("sampling")
        sampling = from_wire(SamplingParameters, parameters.sampling) if given else SamplingParameters()
    except ValueError as error:
        raise BadMessageError(str(error)) from error
    return Opened(parameters.prompt_length, sampling, parameters.cache_scope, list(parameters.committed_tokens))


def _parts(tokens: Sequence[int], counts: Sequence[int]) -> Iterator[Sequence[int]]:
    start = 0
    for count in counts:
        yield tokens[start : start + count]
        start += count
