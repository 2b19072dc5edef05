"""Converts the scheduler core's messages to and from the protocol buffers of protos/worker.proto."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spool.protos import worker_pb2
from spool.scheduler.messages import (
    DraftingReport,
    ProposalSource,
    Role,
    Row,
    RowResult,
    RowStatus,
    SendStep,
    SequenceRequest,
    TokenLogprobs,
    WorkerSpec,
)
from spool.services.receipts.fingerprint import fingerprint_name
from spool.services.rpc.conversion import WireEnum, from_wire, to_wire
from spool.services.rpc.protocol_version import release_numbers

ROLES = WireEnum(Role, worker_pb2.Role, "ROLE_")
SOURCES = WireEnum(ProposalSource, worker_pb2.ProposalSource, "PROPOSAL_SOURCE_")
ROW_STATUSES = WireEnum(RowStatus, worker_pb2.RowStatus, "ROW_STATUS_")


def spec_from_wire(worker_id: str, description: worker_pb2.WorkerDescription) -> WorkerSpec:
    """Raises ValueError naming the field that is out of range."""
    parts = description.fingerprint
    return from_wire(
        WorkerSpec,
        description,
        worker_id=worker_id,
        role=ROLES.from_wire(description.role),
        fingerprint=fingerprint_name(parts) if parts else "",
        release=release_numbers(description.version),
    )


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
        verify=row.verify,
        draft_length=row.draft_length,
        lookup_length=row.lookup_length,
        sample=row.sample,
        parameters=opening_to_wire(row.opening, row.committed) if row.opening is not None else None,
        scoring=None if row.scoring is None else to_wire(worker_pb2.PromptScoring, row.scoring),
    )


def step_to_wire(
    step: SendStep, worker_epoch: int, scheduler_epoch: int, grant: worker_pb2.DraftGrant | None = None
) -> worker_pb2.StepRequest:
    """`grant` is the step's, as the worker gets it."""
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
            draft_lengths=_column([row.draft_length for row in following]),
            verify=_column([row.verify for row in following]),
            lookup_lengths=_lookup_lengths(following),
        )
        if following
        else None,
        grant=grant,
        wait_seconds=step.wait_seconds,
    )


def answers_to_wire(results: Sequence[RowResult]) -> worker_pb2.RowAnswers:
    """Of all rows of a step, in their order: those that follow come last. `accepted` is not sent: where a row has given
    tokens, all but the last of them are accepted ones."""
    ok = RowStatus.OK
    answers = worker_pb2.RowAnswers(
        counts=[len(result.tokens) for result in results],
        tokens=[token for result in results for token in result.tokens],
        kv_lens=[result.kv_len for result in results],
        verified=_column([result.verified for result in results]),
        reused=_column([result.reused for result in results]),
    )
    if any(result.status is not ok or not result.tokens for result in results):
        answers.prefix_digests.extend(0 if result.tokens else result.prefix_digest for result in results)
    if any(result.status is not ok for result in results):
        answers.statuses.extend(ROW_STATUSES.to_wire(result.status) for result in results)
    if any(result.source is not None for result in results):
        nobody = worker_pb2.PROPOSAL_SOURCE_UNSPECIFIED
        answers.sources.extend(nobody if one.source is None else SOURCES.to_wire(one.source) for one in results)
    if any(result.logits_digests for result in results):
        for result in results:
            answers.logits_digests.extend(result.logits_digests or (0,) * len(result.tokens))
    for place, result in enumerate(results):
        if result.error or result.logprobs or result.prompt_logprobs:
            answers.details.add(
                row=place,
                error=result.error,
                logprobs=map(logprobs_to_wire, result.logprobs),
                prompt_logprobs=map(logprobs_to_wire, result.prompt_logprobs),
            )
    return answers


def results_from_wire(step: SendStep, reply: worker_pb2.StepReply) -> tuple[RowResult, ...]:
    """One result for each row of the step, in their order. Raises ValueError naming a column that is too long or too
    short, a status or source that this version does not know, and details out of place."""
    rows, answers = step.rows, reply.rows
    size = len(rows)
    counts, tokens, kv_lens = list(answers.counts), tuple(answers.tokens), list(answers.kv_lens)
    logits_digests = tuple(answers.logits_digests)
    names = "statuses", "prefix_digests", "verified", "reused", "sources"
    optional = {name: list(getattr(answers, name)) for name in names}
    _check_size("counts", counts, size)
    _check_size("tokens", tokens, sum(counts))
    _check_size("kv_lens", kv_lens, size)
    for name, column in optional.items():
        if column:
            _check_size(name, column, size)
    if logits_digests:
        _check_size("logits_digests", logits_digests, len(tokens))
    none = [0] * size
    statuses = [ROW_STATUSES.from_wire(status) for status in optional["statuses"]] or [RowStatus.OK] * size
    digests, verified, reused, sources = (optional[name] or none for name in names[1:])
    results = list[RowResult]()
    first = 0
    for place, row in enumerate(rows):
        count = counts[place]
        end, accepted = first + count, count - 1 if count else 0
        result = RowResult(
            row.sequence_id, statuses[place], kv_lens[place], digests[place], tokens[first:end], accepted
        )
        result.verified, result.reused = verified[place], reused[place]
        if sources[place]:
            result.source = SOURCES.from_wire(sources[place])
        if logits_digests and count and logits_digests[first]:
            result.logits_digests = logits_digests[first:end]
        results.append(result)
        first = end
    _take_details(results, answers.details)
    return tuple(results)


def _take_details(results: list[RowResult], details: Iterable[worker_pb2.RowDetails]) -> None:
    before = -1
    for one in details:
        if not before < one.row < len(results):
            raise ValueError(f"details are of row {one.row}, must be above {before} and below {len(results)}")
        result, before = results[one.row], one.row
        result.error = one.error
        result.logprobs = tuple(map(logprobs_from_wire, one.logprobs))
        result.prompt_logprobs = tuple(map(logprobs_from_wire, one.prompt_logprobs))


def report_to_wire(report: DraftingReport) -> worker_pb2.DraftingReport:
    return to_wire(worker_pb2.DraftingReport, report, refused_ids=report.refused)


def report_from_wire(report: worker_pb2.DraftingReport) -> DraftingReport:
    return from_wire(DraftingReport, report, refused=tuple(report.refused_ids))


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


def _lookup_lengths(rows: Sequence[Row]) -> list[int]:
    """Nothing where all are as their draft lengths."""
    if all(row.lookup_length is None for row in rows):
        return []
    return [row.draft_length if row.lookup_length is None else row.lookup_length for row in rows]


def _column(values: list[int]) -> list[int]:
    """Nothing where all are 0."""
    return values if any(values) else []


def _check_size(name: str, column: Sequence[int], size: int) -> None:
    if len(column) != size:
        raise ValueError(f"{name} holds {len(column)} entries, must hold {size}")
