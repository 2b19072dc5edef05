"""Requests to draft workers and their proposals, checked and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from spool.protos import draft_pb2, worker_pb2
from spool.scheduler.sampling import SamplingParameters
from spool.services.rpc.conversion import from_wire
from spool.services.worker.drafting.limits import MAX_DRAFT_LENGTH, MAX_SEQUENCES, BadMessageError, check_at_most


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
    opened: Opened | None


@dataclass(slots=True)
class VerdictsOfStep:
    """`size` counts the tokens. The step took so many `seconds`; 0: that is unknown."""

    closed_ids: Sequence[int]
    verdicts: Sequence[Verdict]
    size: int
    seconds: float = 0.0


@dataclass(slots=True)
class Answer:
    """What is proposed after the prefix with this `digest`; without tokens: nothing is. `ahead`: before it was asked
    for. `goes_on`: the draft computes more for the sequence."""

    sequence_id: int
    digest: int
    tokens: Sequence[int]
    ahead: bool = False
    goes_on: bool = False


def verdicts_from_wire(request: draft_pb2.DraftRequest, vocabulary_size: int) -> VerdictsOfStep:
    """Raises BadMessageError."""
    ids, lengths, wanted = request.sequence_ids, request.lengths, request.draft_lengths
    check_at_most("the number of sequence_ids", len(ids), MAX_SEQUENCES, "RESOURCE_EXHAUSTED")
    check_at_most("the number of closed_ids", len(request.closed_ids), MAX_SEQUENCES, "RESOURCE_EXHAUSTED")
    parts = _parts(request, ("lengths", "digests", "counts", "draft_lengths"), vocabulary_size)
    opened = {one.sequence_id: _opened(one.parameters, vocabulary_size) for one in request.sequences}
    check_at_most("an entry of draft_lengths", max(wanted, default=0), MAX_DRAFT_LENGTH)
    verdicts = [
        Verdict(*columns, opened.get(columns[0]))
        for columns in zip(ids, lengths, request.digests, parts, wanted, strict=True)
    ]
    size = len(request.tokens) + sum(len(one.tokens) for one in opened.values())
    return VerdictsOfStep(list(request.closed_ids), verdicts, size, request.step_seconds)


def answers_from_wire(proposals: draft_pb2.Proposals, vocabulary_size: int) -> list[Answer]:
    """Raises BadMessageError."""
    parts = _parts(proposals, ("digests", "counts"), vocabulary_size)
    check_at_most("an entry of counts", max(proposals.counts, default=0), MAX_DRAFT_LENGTH)
    columns = zip(proposals.sequence_ids, proposals.digests, parts, strict=True)
    return [Answer(*one, proposals.ahead, proposals.goes_on) for one in columns]


def _parts(
    message: draft_pb2.DraftRequest | draft_pb2.Proposals, columns: Sequence[str], vocabulary_size: int
) -> list[Sequence[int]]:
    """The tokens of each place. Raises BadMessageError where columns do not fit each other, and for other tokens than
    there are."""
    tokens, counts, size = message.tokens, message.counts, len(message.sequence_ids)
    for name in columns:
        if (found := len(getattr(message, name))) != size:
            raise BadMessageError(f"{name} has {found} entries, must have {size} as sequence_ids has")
    ends = list(accumulate(counts, initial=0))
    if ends[-1] != len(tokens):
        raise BadMessageError(f"tokens has {len(tokens)} entries, must have {ends[-1]} as counts says")
    _check_tokens("tokens", tokens, vocabulary_size)
    return [tokens[start:end] for start, end in pairwise(ends)]


def _opened(parameters: worker_pb2.SequenceParameters, vocabulary_size: int) -> Opened:
    _check_tokens("committed_tokens", parameters.committed_tokens, vocabulary_size)
    try:
        given = parameters.HasField("sampling")
        sampling = from_wire(SamplingParameters, parameters.sampling) if given else SamplingParameters()
    except ValueError as error:
        raise BadMessageError(str(error)) from error
    return Opened(parameters.prompt_length, sampling, parameters.cache_scope, list(parameters.committed_tokens))


def _check_tokens(name: str, tokens: Sequence[int], vocabulary_size: int) -> None:
    """A `vocabulary_size` of 0 admits all ids. Raises BadMessageError."""
    if vocabulary_size and tokens and (largest := max(tokens)) >= vocabulary_size:
        raise BadMessageError(f"{name} holds {largest}, must be below vocabulary_size {vocabulary_size}")
