"""Applies workers' answers, row by row: progress, commits, and what to do about rows that failed."""

from __future__ import annotations

from scheduler.lifecycle import Lifecycle
from scheduler.messages import EmitTokens, Row, RowResult, RowStatus
from scheduler.sequence import Sequence, SequenceState
from scheduler.statistics import Counters
from scheduler.step_times import Acceptance
from scheduler.worker_book import DraftBook, InFlightRow, OutstandingStep, TargetBook, WorkerBook

MOST_TARGET_FAILURES = 5
"""Rows of one sequence in a row that a target may answer with lost KV before the sequence fails."""
MOST_DRAFT_FAILURES = 3
"""The same on draft workers, before the sequence goes on without a draft."""


class Rounds:
    """One answered step at a time."""

    def __init__(self, lifecycle: Lifecycle, acceptance: Acceptance, counters: Counters) -> None:
        self._lifecycle = lifecycle
        self._acceptance = acceptance
        self._counters = counters

    def draft_step(
        self, draft: DraftBook, step: OutstandingStep, results: dict[int, RowResult], seconds: float, now: float
    ) -> None:
        if step.proposals:
            draft.times.observe(step.packed_rows, seconds)
        for flight in step.rows:
            del draft.in_flight[flight.row.sequence_id]
            if not flight.abandoned:
                result = results.get(flight.row.sequence_id) or _missing(flight.row)
                self._draft_row(draft, flight, result, now)

    def target_step(
        self, target: TargetBook, step: OutstandingStep, results: dict[int, RowResult], seconds: float, now: float
    ) -> None:
        if step.group is not None:
            target.times.observe(step.packed_rows, step.group.equal_length, seconds)
        for flight in step.rows:
            del target.in_flight[flight.row.sequence_id]
            if not flight.abandoned:
                result = results.get(flight.row.sequence_id) or _missing(flight.row)
                self._target_row(target, flight, result, now)

    # --- draft rows ---------------------------------------------------------------------------------------------------

    def _draft_row(self, draft: DraftBook, flight: InFlightRow, result: RowResult, now: float) -> None:
        sequence, row = flight.sequence, flight.row
        entry = draft.kv[sequence.sequence_id]
        fed = row.kv_len + len(row.tokens)
        proposed = sequence.state is SequenceState.DRAFTING
        match result.status:
            case RowStatus.OK:
                sequence.draft_failures = 0 if result.kv_len >= fed else sequence.draft_failures + 1
                entry.valid = max(0, min(fed, result.kv_len))
                if proposed:
                    proposal = result.tokens[: row.draft_length]
                    entry.ahead = max(0, min(result.kv_len - fed, len(proposal) - 1))
                    draft.note_lack(sequence)
                    self._lifecycle.become_drafted(sequence, proposal, now)
            case RowStatus.UNKNOWN_SEQUENCE:
                sequence.draft_failures += 1
                entry.reset()
                entry.opened = False
            case RowStatus.KV_MISMATCH:
                sequence.draft_failures += 1
                entry.valid = _agreed_length(sequence, result)
            case RowStatus.OUT_OF_PAGES:
                sequence.draft_failures += 1
                self._lifecycle.leave_draft(sequence)
            case _:
                sequence.drafting_refused = True
        if sequence.drafting_refused or sequence.draft_failures >= MOST_DRAFT_FAILURES:
            sequence.drafting_refused = True
            self._lifecycle.leave_draft(sequence)
        if sequence.draft is not None:
            draft.note_lack(sequence)
        if sequence.state is SequenceState.DRAFTING or (
            sequence.state is SequenceState.READY and sequence.draft is None
        ):
            self._lifecycle.begin_round(sequence, now)

    # --- target rows --------------------------------------------------------------------------------------------------

    def _target_row(self, target: TargetBook, flight: InFlightRow, result: RowResult, now: float) -> None:
        sequence, row = flight.sequence, flight.row
        entry = target.kv[sequence.sequence_id]
        match result.status:
            case RowStatus.OK if row.choose:
                self._commit(target, sequence, row, result, now)
            case RowStatus.OK if result.kv_len >= row.kv_len + len(row.tokens):
                entry.valid = row.kv_len + len(row.tokens)
            case RowStatus.OK | RowStatus.KV_MISMATCH:
                entry.valid = min(_agreed_length(sequence, result), sequence.length - 1)
                self._lost_kv(target, sequence, result)
            case RowStatus.UNKNOWN_SEQUENCE:
                entry.reset()
                entry.opened = False
                self._lost_kv(target, sequence, result)
            case RowStatus.OUT_OF_PAGES:
                entry.valid = row.kv_len
                self._out_of_pages(target, sequence, result)
            case _:
                self._lifecycle.fail(sequence, _error(target, result))

    def _commit(self, target: TargetBook, sequence: Sequence, row: Row, result: RowResult, now: float) -> None:
        accepted, drafted = result.accepted, len(row.draft_tokens)
        legal = 0 <= accepted <= drafted and len(result.tokens) == accepted + 1
        if not legal or result.tokens[:accepted] != row.draft_tokens[:accepted]:
            error = (
                f"{accepted} of {drafted} draft tokens accepted and {len(result.tokens)} tokens returned do not match"
            )
            self._lifecycle.fail(sequence, f"target worker {target.worker_id}: {error}")
            return
        fed = row.kv_len + len(row.tokens)
        target.kv[sequence.sequence_id].valid = max(0, min(fed + accepted, result.kv_len))
        sequence.target_failures = 0
        sequence.draft_tokens = ()
        self._acceptance.observe(drafted, accepted)
        emitted, reason = sequence.commit(result.tokens)
        accepted = min(accepted, len(emitted))
        self._counters.count_round(len(emitted), drafted, accepted)
        self._lifecycle.commands.append(
            EmitTokens(
                sequence.sequence_id,
                emitted,
                drafted,
                accepted,
                result.logits_digests[: len(emitted)],
                result.logprobs[: len(emitted)],
            )
        )
        if reason is not None:
            self._lifecycle.finish(sequence, reason)
            return
        if sequence.draft is not None:
            sequence.draft.kv[sequence.sequence_id].settle_proposal(result.accepted)
            sequence.draft.note_lack(sequence)
        if target.kv[sequence.sequence_id].valid < sequence.length - 1:
            self._lifecycle.catch_up(sequence)
        else:
            self._lifecycle.begin_round(sequence, now)

    def _lost_kv(self, target: TargetBook, sequence: Sequence, result: RowResult) -> None:
        sequence.target_failures += 1
        if sequence.target_failures > MOST_TARGET_FAILURES:
            times = f"{sequence.target_failures} times without progress"
            self._lifecycle.fail(sequence, f"{_error(target, result)}, {times}")
        else:
            self._lifecycle.catch_up(sequence)

    def _out_of_pages(self, target: TargetBook, sequence: Sequence, result: RowResult) -> None:
        """The worker has fewer pages than it said. The youngest makes room; one that is alone can only try again."""
        if len(target.sequences) == 1:
            self._lost_kv(target, sequence, result)
            return
        victim = target.youngest_idle(sequence.order, ()) or sequence
        self._lifecycle.preempt(victim)
        if victim is not sequence:
            self._lifecycle.catch_up(sequence)


def _agreed_length(sequence: Sequence, result: RowResult) -> int:
    """The worker's KV length if what it holds are the sequence's committed tokens, else 0."""
    if 0 <= result.kv_len <= sequence.length and sequence.tokens.digest(result.kv_len) == result.prefix_digest:
        return result.kv_len
    return 0


def _missing(row: Row) -> RowResult:
    return RowResult(row.sequence_id, RowStatus.FAILED, 0, 0, error="the worker's answer lacks this row")


def _error(book: WorkerBook, result: RowResult) -> str:
    detail = f": {result.error}" if result.error else ""
    return f"{book.spec.role.value} worker {book.worker_id} answered {result.status.value}{detail}"
