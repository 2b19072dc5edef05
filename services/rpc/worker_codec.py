"""Converts the scheduler core's messages to and from the protocol buffers of protos/worker.proto."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from protos import worker_pb2
from scheduler.messages import (
    Outcome,
    PromptScoring,
    Role,
    Row,
    RowResult,
    RowStatus,
    SendStep,
    SequenceRequest,
    TokenLogprobs,
    WorkerSpec,
)
from scheduler.sampling import Grammar, SamplingParameters
from scheduler.speculation.acceptance import MAX_CONFIDENCE
from services.observability.observer import StepTimings

_ROLES = {Role.DRAFT: worker_pb2.ROLE_DRAFT, Role.TARGET: worker_pb2.ROLE_TARGET}
_STATUSES = {
    RowStatus.OK: worker_pb2.ROW_STATUS_OK,
    RowStatus.UNKNOWN_SEQUENCE: worker_pb2.ROW_STATUS_UNKNOWN_SEQUENCE,
    RowStatus.KV_MISMATCH: worker_pb2.ROW_STATUS_KV_MISMATCH,
    RowStatus.OUT_OF_PAGES: worker_pb2.ROW_STATUS_OUT_OF_PAGES,
    RowStatus.INVALID: worker_pb2.ROW_STATUS_INVALID,
    RowStatus.FAILED: worker_pb2.ROW_STATUS_FAILED,
}
_STATUSES_BACK = {number: status for status, number in _STATUSES.items()}


def role_to_wire(role: Role) -> worker_pb2.Role:
    return _ROLES[role]


def role_from_wire(role: int) -> Role:
    """Raises ValueError for a role that is neither draft nor target."""
    for known, number in _ROLES.items():
        if number == role:
            return known
    raise ValueError(f"role is {role}, must be ROLE_DRAFT or ROLE_TARGET")


def status_to_wire(status: RowStatus) -> worker_pb2.RowStatus:
    return _STATUSES[status]


def spec_from_wire(worker_id: str, description: worker_pb2.WorkerDescription) -> WorkerSpec:
    """Raises ValueError naming the field that is out of range."""
    return WorkerSpec(
        worker_id=worker_id,
        role=role_from_wire(description.role),
        page_size=description.page_size,
        total_pages=description.total_pages,
        max_sequence_length=description.max_sequence_length,
        max_num_batched_tokens=description.max_num_batched_tokens,
        shares_cores=description.exclusive_threads > description.threads,
        model_id=description.model_id,
    )


def timings_from_wire(timings: worker_pb2.StepTimings) -> StepTimings:
    return StepTimings(
        queued=timings.queued,
        idle=timings.idle,
        prepare=timings.prepare,
        realign=timings.realign,
        forward=timings.forward,
        sample=timings.sample,
        total=timings.total,
        packed_rows=timings.packed_rows,
        padding_rows=timings.padding_rows,
    )


def sampling_to_wire(sampling: SamplingParameters) -> worker_pb2.SamplingParameters:
    return worker_pb2.SamplingParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        end_token_ids=sorted(sampling.end_token_ids),
        grammar=None if sampling.grammar is None else _grammar_to_wire(sampling.grammar),
        bad_words=[worker_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
    )


def _grammar_to_wire(grammar: Grammar) -> worker_pb2.Grammar:
    return worker_pb2.Grammar(definition=grammar.definition, end_token_ids=sorted(grammar.end_token_ids))


def _grammar_from_wire(grammar: worker_pb2.Grammar) -> Grammar:
    return Grammar(grammar.definition, frozenset(grammar.end_token_ids))


def sampling_from_wire(sampling: worker_pb2.SamplingParameters) -> SamplingParameters:
    """Raises ValueError naming the field that is out of range."""
    return SamplingParameters(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        end_token_ids=frozenset(sampling.end_token_ids),
        grammar=_grammar_from_wire(sampling.grammar) if sampling.HasField("grammar") else None,
        bad_words=tuple(tuple(word.token_ids) for word in sampling.bad_words),
    )


def opening_to_wire(request: SequenceRequest, committed: Sequence[int] = ()) -> worker_pb2.SequenceParameters:
    """`committed` as in `Row`."""
    return worker_pb2.SequenceParameters(
        prompt_length=len(request.prompt),
        sampling=sampling_to_wire(request.sampling),
        logits_digests=request.logits_digests,
        top_logprobs=request.top_logprobs,
        committed_tokens=committed,
    )


def row_to_wire(row: Row) -> worker_pb2.Row:
    return worker_pb2.Row(
        sequence_id=row.sequence_id,
        kv_len=row.kv_len,
        prefix_digest=row.prefix_digest,
        tokens=row.tokens,
        draft_tokens=row.draft_tokens,
        draft_length=row.draft_length,
        sample=row.sample,
        parameters=opening_to_wire(row.opening, row.committed) if row.opening is not None else None,
        scoring=None if row.scoring is None else _scoring_to_wire(row.scoring),
        outcomes=row.outcomes,
    )


def _scoring_to_wire(scoring: PromptScoring) -> worker_pb2.PromptScoring:
    return worker_pb2.PromptScoring(first=scoring.first, tokens=scoring.tokens, top=scoring.top)


def scoring_from_wire(scoring: worker_pb2.PromptScoring) -> PromptScoring:
    return PromptScoring(scoring.first, tuple(scoring.tokens), scoring.top)


def step_to_wire(step: SendStep, worker_epoch: int, scheduler_epoch: int) -> worker_pb2.StepRequest:
    return worker_pb2.StepRequest(
        worker_epoch=worker_epoch,
        step_id=step.step_id,
        scheduler_epoch=scheduler_epoch,
        released_sequence_ids=step.released,
        rows=[row_to_wire(row) for row in step.rows],
        exclusive=step.exclusive,
    )


def logprobs_to_wire(logprobs: TokenLogprobs) -> worker_pb2.TokenLogprobs:
    return worker_pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def logprobs_from_wire(logprobs: worker_pb2.TokenLogprobs) -> TokenLogprobs:
    """Raises ValueError where ids and values differ in number."""
    top = tuple(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True))
    return TokenLogprobs(logprobs.token_id, logprobs.logprob, top)


def confidences_to_wire(confidences: Sequence[float]) -> bytes:
    """One byte for each number; numbers are between 0 and 1."""
    return np.minimum(np.array(confidences) * (MAX_CONFIDENCE + 1), MAX_CONFIDENCE).astype(np.uint8).tobytes()


def result_from_wire(reply: worker_pb2.RowReply) -> RowResult:
    """Raises ValueError for a status that this version does not know, and for outcomes that do not add up."""
    status = _STATUSES_BACK.get(reply.status)
    if status is None:
        raise ValueError(f"status of the row of sequence {reply.sequence_id} is {reply.status}, which is not known")
    return RowResult(
        sequence_id=reply.sequence_id,
        status=status,
        kv_len=reply.kv_len,
        prefix_digest=reply.prefix_digest,
        tokens=tuple(reply.tokens),
        accepted=reply.accepted,
        logits_digests=tuple(reply.logits_digests),
        logprobs=tuple(logprobs_from_wire(logprobs) for logprobs in reply.logprobs),
        error=reply.error,
        reused=reply.reused,
        confidences=reply.confidences,
        prompt_logprobs=tuple(logprobs_from_wire(logprobs) for logprobs in reply.prompt_logprobs),
        outcomes=_outcomes_from_wire(reply.outcomes) if reply.HasField("outcomes") else (),
    )


def _outcomes_from_wire(outcomes: worker_pb2.Outcomes) -> tuple[Outcome, ...]:
    accepted, tokens, lengths = tuple(outcomes.accepted), tuple(outcomes.tokens), tuple(outcomes.lengths)
    proposed, confidences = tuple(outcomes.draft_tokens), outcomes.confidences
    whole = len(accepted) == len(tokens) == len(lengths) and sum(lengths) == len(proposed)
    if not whole or len(confidences) not in (0, len(proposed)):
        raise ValueError(
            f"outcomes have {len(accepted)} accepted, {len(tokens)} tokens, {len(lengths)} lengths of {sum(lengths)} "
            f"in all, {len(proposed)} draft_tokens and {len(confidences)} confidences, which does not add up"
        )
    ends = tuple(accumulate(lengths))
    return tuple(
        Outcome(count, token, proposed[end - length : end], confidences[end - length : end])
        for count, token, length, end in zip(accepted, tokens, lengths, ends, strict=True)
    )
