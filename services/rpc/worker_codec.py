"""Converts the scheduler core's messages to and from the protocol buffers of protos/worker.proto."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from protos import worker_pb2
from scheduler.messages import (
    Outcome,
    Role,
    Row,
    RowResult,
    RowStatus,
    SendStep,
    SequenceRequest,
    TokenLogprobs,
    WorkerSpec,
)
from services.rpc.conversion import WireEnum, from_wire, to_wire
from services.rpc.followed_rows import followed_from_wire

ROLES = WireEnum(Role, worker_pb2.Role, "ROLE_")
ROW_STATUSES = WireEnum(RowStatus, worker_pb2.RowStatus, "ROW_STATUS_")


def spec_from_wire(worker_id: str, description: worker_pb2.WorkerDescription) -> WorkerSpec:
    """Raises ValueError naming the field that is out of range."""
    return from_wire(WorkerSpec, description, worker_id=worker_id, role=ROLES.from_wire(description.role))


def opening_to_wire(request: SequenceRequest, committed: Sequence[int] = ()) -> worker_pb2.SequenceParameters:
    """`committed` as in `Row`."""
    return to_wire(
        worker_pb2.SequenceParameters, request, prompt_length=len(request.prompt), committed_tokens=committed
    )


def row_to_wire(row: Row) -> worker_pb2.Row:
    return worker_pb2.Row(
        sequence_id=row.sequence_id,
        kv_len=row.kv_len,
        prefix_digest=row.prefix_digest,
        tokens=() if row.known else row.tokens,
        known_tokens=len(row.tokens) if row.known else 0,
        draft_tokens=row.draft_tokens,
        draft_length=row.draft_length,
        sample=row.sample,
        parameters=opening_to_wire(row.opening, row.committed) if row.opening is not None else None,
        scoring=None if row.scoring is None else to_wire(worker_pb2.PromptScoring, row.scoring),
        outcomes=row.outcomes,
    )


def step_to_wire(step: SendStep, worker_epoch: int, scheduler_epoch: int) -> worker_pb2.StepRequest:
    following = [row for row in step.rows if row.follows]
    return worker_pb2.StepRequest(
        worker_epoch=worker_epoch,
        step_id=step.step_id,
        scheduler_epoch=scheduler_epoch,
        released_sequence_ids=step.released,
        rows=[row_to_wire(row) for row in step.rows if not row.follows],
        following=worker_pb2.FollowingRows(
            sequence_ids=[row.sequence_id for row in following],
            kv_lens=[row.kv_len for row in following],
            prefix_digests=[row.prefix_digest for row in following],
            draft_lengths=[row.draft_length for row in following] if any(row.draft_length for row in following) else (),
        )
        if following
        else None,
    )


def results_from_wire(step: SendStep, reply: worker_pb2.StepReply) -> tuple[RowResult, ...]:
    """One result for each row of the step, in their order. Raises ValueError where the reply does not answer it."""
    first = next((place for place, row in enumerate(step.rows) if row.follows), len(step.rows))
    results = [result_from_wire(answer) for answer in reply.rows[:first]]
    replies = iter(reply.rows[first:])
    for result in followed_from_wire(step.rows[first:], reply.followed):
        if result is not None:
            results.append(result)
        elif (answer := next(replies, None)) is not None:
            results.append(result_from_wire(answer))
    sent, answered = [row.sequence_id for row in step.rows], [result.sequence_id for result in results]
    left = [answer.sequence_id for answer in replies]
    if sent != answered or left:
        raise ValueError(f"rows are of sequences {answered + left}, must be of {sent}")
    return tuple(results)


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


def result_from_wire(reply: worker_pb2.RowReply) -> RowResult:
    """Raises ValueError for a status that this version does not know, and for outcomes that do not add up."""
    return RowResult(
        sequence_id=reply.sequence_id,
        status=ROW_STATUSES.from_wire(reply.status),
        kv_len=reply.kv_len,
        prefix_digest=reply.prefix_digest,
        tokens=tuple(reply.tokens),
        accepted=reply.accepted,
        logits_digests=tuple(reply.logits_digests),
        logprobs=tuple(logprobs_from_wire(logprobs) for logprobs in reply.logprobs),
        error=reply.error,
        reused=reply.reused,
        prompt_logprobs=tuple(logprobs_from_wire(logprobs) for logprobs in reply.prompt_logprobs),
        outcomes=_outcomes_from_wire(reply.outcomes) if reply.HasField("outcomes") else (),
    )


def _outcomes_from_wire(outcomes: worker_pb2.Outcomes) -> tuple[Outcome, ...]:
    accepted, tokens, lengths = tuple(outcomes.accepted), tuple(outcomes.tokens), tuple(outcomes.lengths)
    proposed = tuple(outcomes.draft_tokens)
    if not len(accepted) == len(tokens) == len(lengths) or sum(lengths) != len(proposed):
        raise ValueError(
            f"outcomes have {len(accepted)} accepted, {len(tokens)} tokens, {len(lengths)} lengths of {sum(lengths)} "
            f"in all and {len(proposed)} draft_tokens, which does not add up"
        )
    ends = tuple(accumulate(lengths))
    return tuple(
        Outcome(count, token, proposed[end - length : end])
        for count, token, length, end in zip(accepted, tokens, lengths, ends, strict=True)
    )
