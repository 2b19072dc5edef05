"""Applies workers' answers, row by row: progress, commits, and the handling of rows that failed."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.messages import EmitTokens, Row, RowResult, RowStatus
from scheduler.state.kv_ledger import KvEntry
from scheduler.state.worker_base import DraftWork, InFlightRow, OutstandingStep, TargetWork
from scheduler.state.workers import STEADY_KV_LAG, DraftWorker, Sequence, TargetWorker, Worker
from scheduler.transitions.blame import clear, suspect
from scheduler.transitions.lifecycle import DRAFTING, READY, VERIFYING, Lifecycle
from scheduler.transitions.parts import CoreParts

Results = Mapping[int, RowResult]

MAX_TARGET_FAILURES = 5
"""Consecutive rows of a sequence that a target may answer with lost KV before the sequence fails."""
MAX_DRAFT_FAILURES = 3
"""Consecutive failures of a sequence on draft workers before it goes on without a draft."""


class Rounds:
    """Applies one answered step at a time."""

    def __init__(self, parts: CoreParts, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._controller = parts.controller
        self._counters = parts.counters
        self._emit = parts.emit

    def draft_step(self, draft: DraftWorker, step_id: int, results: Results, seconds: float, now: float) -> None:
        step = draft.take_answered(step_id)
        if step is None:
            return
        _leave_out_reused(step, results)
        if any(_ended_early(flight.row, results) for flight in step.rows):
            step.work = DraftWork()
        self._controller.draft_step(draft, step.work, seconds, step.elapsed(now))
        together = _failed_together(step, results)
        for flight in step.rows:
            wanted = not flight.abandoned
            draft.row_answered(flight)
            if not flight.abandoned:
                result = results.get(flight.row.sequence_id) or _missing(flight.row)
                self._draft_row(draft, flight, result, together, now)
            elif wanted and flight.sequence.state is DRAFTING:
                # Its proposal overtook the answer to what was prepared, and does not count.
                self._lifecycle.begin_round(flight.sequence, now)

    def target_step(self, target: TargetWorker, step_id: int, results: Results, seconds: float, now: float) -> None:
        step = target.take_answered(step_id)
        if step is None:
            return
        _leave_out_reused(step, results)
        _leave_out_known(target, step)
        if self._controller.target_step(target, step.work, seconds, step.elapsed(now)):
            self._lifecycle.drafting_changed(target)
        together = _failed_together(step, results)
        for flight in step.rows:
            target.row_answered(flight)
            if flight.abandoned:
                continue
            result = results.get(flight.row.sequence_id) or _missing(flight.row)
            if result.status is not RowStatus.OK or result.kv_len < flight.row.end:
                target.abandon_rows(flight.row.sequence_id)
            self._target_row(target, flight, result, together, now)

    # --- draft rows ---------------------------------------------------------------------------------------------------

    def _draft_row(
        self, draft: DraftWorker, flight: InFlightRow[Sequence], result: RowResult, together: bool, now: float
    ) -> None:
        sequence, row = flight.sequence, flight.row
        entry = draft.kv[sequence.sequence_id]
        fed = row.end
        proposed = sequence.state is DRAFTING
        match result.status:
            case RowStatus.OK if row.outcomes:
                _take_outcomes(entry, flight, result)
            case RowStatus.OK:
                length = row.draft_length
                ahead = result.kv_len - fed
                if ahead >= 0:
                    sequence.draft_failures = 0
                    entry.valid = fed
                else:
                    sequence.draft_failures += 1
                    entry.valid = max(0, result.kv_len)
                if not length:
                    entry.valid = max(entry.valid, _agreed_length(sequence, result))
                if proposed:
                    if sequence.proposals_owed:
                        sequence.proposals_owed -= 1
                    proposal = result.tokens[:length]
                    last = len(proposal) - 1
                    if ahead > last:
                        ahead = last
                    entry.ahead = ahead if ahead > 0 else 0
                    self._lifecycle.become_drafted(sequence, proposal, length, now, result.confidences[:length])
            case RowStatus.UNKNOWN_SEQUENCE:
                sequence.draft_failures += 1
                entry.reset()
                entry.opened = False
            case RowStatus.KV_MISMATCH:
                sequence.draft_failures += 1
                entry.valid, entry.ahead = _agreed_length(sequence, result), 0
            case RowStatus.OUT_OF_PAGES:
                sequence.draft_failures += 1
                self._lifecycle.leave_draft(sequence)
            case _ if together:
                sequence.draft_failures += 1
                entry.reset()
                entry.opened = False
            case _:
                sequence.drafting_refused = True
        if sequence.drafting_refused or sequence.draft_failures >= MAX_DRAFT_FAILURES:
            sequence.drafting_refused = True
            self._lifecycle.leave_draft(sequence)
        if sequence.draft is not None and (draft.lagging or entry.valid + STEADY_KV_LAG < sequence.length):
            draft.update_lagging(sequence)
        # A row that prepared is followed by the one that proposes, where the target was sooner.
        answers_round = not row.outcomes or sequence.draft is None
        if (sequence.state is DRAFTING and answers_round) or (sequence.state is READY and sequence.draft is None):
            self._lifecycle.begin_round(sequence, now)

    # --- target rows --------------------------------------------------------------------------------------------------

    def _target_row(
        self, target: TargetWorker, flight: InFlightRow[Sequence], result: RowResult, together: bool, now: float
    ) -> None:
        sequence, row = flight.sequence, flight.row
        entry = target.kv[sequence.sequence_id]
        if row.scoring is not None and result.status is RowStatus.OK:
            if tuple(logprobs.token_id for logprobs in result.prompt_logprobs) != row.scoring.tokens:
                error = f"{len(row.scoring.tokens)} log probabilities of prompt tokens were asked for, others came"
                self._lifecycle.fail(sequence, f"target worker {target.worker_id}: {error}")
                return
            sequence.take_scores(result.prompt_logprobs)
        match result.status:
            case RowStatus.OK if row.sample:
                self._commit(target, entry, sequence, row, result, now)
            case RowStatus.OK if result.kv_len >= row.end:
                entry.valid = max(row.end, _usable_length(sequence, result))
                _serve_prompt(sequence, row, result, entry.valid)
            case RowStatus.OK | RowStatus.KV_MISMATCH | RowStatus.VOID:
                entry.valid = _usable_length(sequence, result)
                self._lost_kv(target, sequence, result)
            case RowStatus.UNKNOWN_SEQUENCE:
                entry.reset()
                entry.opened = False
                self._lost_kv(target, sequence, result)
            case RowStatus.OUT_OF_PAGES:
                entry.valid = row.kv_len
                self._out_of_pages(target, sequence, result)
            case _ if together:
                entry.reset()
                entry.opened = False
                suspect(sequence, self._emit)
                self._lifecycle.catch_up(sequence)
            case _:
                self._lifecycle.fail(sequence, _error(target, result))

    def _commit(
        self, target: TargetWorker, entry: KvEntry, sequence: Sequence, row: Row, result: RowResult, now: float
    ) -> None:
        accepted, drafted, tokens = result.accepted, len(row.draft_tokens), result.tokens
        legal = 0 <= accepted <= drafted and len(tokens) == accepted + 1
        if not legal or (accepted and tokens[:accepted] != row.draft_tokens[:accepted]):
            error = f"{accepted} of {drafted} draft tokens accepted and {len(tokens)} tokens returned do not match"
            self._lifecycle.fail(sequence, f"target worker {target.worker_id}: {error}")
            return
        fed = sequence.length + accepted
        entry.valid = fed if result.kv_len >= fed else max(0, result.kv_len)
        sequence.target_failures = 0
        sequence.draft_tokens = ()
        if sequence.state is VERIFYING:
            self._controller.observe(sequence, drafted, accepted)
            self._counters.count_draft_length(sequence.requested_draft_length)
        before = sequence.length
        emitted, reason = sequence.commit(tokens)
        count = len(emitted)
        if sequence.prompt_left:
            _serve_prompt(sequence, row, result, fed)
        sequence.account.serve_output(count, now)
        kept = accepted if accepted < count else count
        digests, logprobs = result.logits_digests, result.logprobs
        if count < len(tokens):
            digests, logprobs = digests[:count], logprobs[:count]
        emission = EmitTokens(sequence.sequence_id, emitted, drafted, kept, digests, logprobs)
        if sequence.cached or sequence.prompt_logprobs:
            emission.prompt_logprobs, emission.cached = tuple(sequence.prompt_logprobs), sequence.cached
            sequence.prompt_logprobs, sequence.cached = [], 0
        self._emit(emission)
        if reason is not None:
            self._lifecycle.finish(sequence, reason)
            return
        if sequence.suspected:
            clear(sequence)
        prepared = sequence.prepared(accepted, tokens[-1]) if sequence.outcomes else None
        if sequence.draft is not None:
            sequence.draft.kv[sequence.sequence_id].settle_proposal(accepted)
            if drafted and sequence.prepared_for == before:
                self._controller.looked_for(sequence.draft, prepared is not None)
        if entry.valid < sequence.length - 1:
            self._lifecycle.catch_up(sequence)
        elif target.following(sequence):
            self._lifecycle.go_on(sequence)
        else:
            self._lifecycle.begin_round(sequence, now, prepared)

    def _lost_kv(self, target: TargetWorker, sequence: Sequence, result: RowResult) -> None:
        sequence.target_failures += 1
        if sequence.target_failures > MAX_TARGET_FAILURES:
            times = f"{sequence.target_failures} times without progress"
            self._lifecycle.fail(sequence, f"{_error(target, result)}, {times}")
        else:
            self._lifecycle.catch_up(sequence)

    def _out_of_pages(self, target: TargetWorker, sequence: Sequence, result: RowResult) -> None:
        """The worker has fewer pages than it said. The last in rank makes room; a single sequence tries again."""
        if len(target.sequences) == 1:
            self._lost_kv(target, sequence, result)
            return
        victim = target.last_idle(sequence, ()) or sequence
        self._lifecycle.preempt(victim)
        if victim is not sequence:
            self._lifecycle.catch_up(sequence)


def _take_outcomes(entry: KvEntry, flight: InFlightRow[Sequence], result: RowResult) -> None:
    """The draft has prepared for outcomes of a verification, which may be over by now."""
    sequence, row = flight.sequence, flight.row
    sequence.draft_failures = 0
    computed = result.kv_len - flight.row.end
    if _is_verified(flight):
        entry.valid = min(flight.row.end, max(0, result.kv_len))
        entry.ahead = max(0, min(computed, len(row.draft_tokens)))
        sequence.outcomes = result.outcomes
    else:
        entry.valid = min(max(entry.valid, flight.row.end), max(0, result.kv_len))


def _is_verified(flight: InFlightRow[Sequence]) -> bool:
    """Whether a target still verifies what the draft prepared for."""
    return flight.sequence.state is VERIFYING and flight.sequence.length == flight.row.end


def _serve_prompt(sequence: Sequence, row: Row, result: RowResult, computed: int) -> None:
    """The target has computed so many committed tokens. What it computes a second time is no further service."""
    prompt = len(sequence.request.prompt)
    before = prompt - sequence.prompt_left
    tokens = min(prompt, computed) - before
    if tokens > 0:
        sequence.prompt_left -= tokens
        sequence.account.serve_prompt(tokens)
        if result.reused > 0 and not sequence.request.committed_output:
            reused = min(prompt, row.kv_len + result.reused) - max(before, row.kv_len)
            sequence.cached += max(0, reused)


def _agreed_length(sequence: Sequence, result: RowResult) -> int:
    """The worker's KV length if it holds KV of the sequence's committed tokens, else 0."""
    if 0 <= result.kv_len <= sequence.length and sequence.tokens.digest(result.kv_len) == result.prefix_digest:
        return result.kv_len
    return 0


def _usable_length(sequence: Sequence, result: RowResult) -> int:
    """How much of the target's KV can be gone on from: at least one logit is still to come, and more where the prompt's
    log probabilities are wanted."""
    return min(_agreed_length(sequence, result), sequence.length - 1, sequence.score_from)


def _leave_out_reused(
    step: OutstandingStep[Sequence, TargetWork] | OutstandingStep[Sequence, DraftWork], results: Results
) -> None:
    """Prefix KV that a worker took over from other sequences took no time."""
    for result in results.values():
        if result.reused > 0:
            fed = [len(one.row.tokens) for one in step.rows if one.row.sequence_id == result.sequence_id]
            step.work.leave_out(min([result.reused, *fed]))


def _leave_out_known(target: TargetWorker, step: OutstandingStep[Sequence, TargetWork]) -> None:
    """Nor did the tokens of a chunk that was sent before an answer told that the worker has KV of them."""
    for flight in step.rows if step.work.prefill_tokens else ():
        if not flight.abandoned and (known := target.kv[flight.row.sequence_id].valid - flight.row.kv_len) > 0:
            step.work.leave_out(min(known, len(flight.row.tokens)))


def _ended_early(row: Row, results: Results) -> bool:
    """Whether a row has prepared fewer or shorter proposals than it was to: another step waited, or it failed."""
    result = results.get(row.sequence_id)
    prepared = 0 if result is None else sum(len(outcome.draft_tokens) for outcome in result.outcomes)
    return prepared < row.outcomes * row.draft_length


def _failed_together(
    step: OutstandingStep[Sequence, TargetWork] | OutstandingStep[Sequence, DraftWork], results: Results
) -> bool:
    """Whether the step failed as a whole: then one of its rows, it is not known which, has failed the others."""
    answers = (results.get(flight.row.sequence_id) for flight in step.rows)
    return len(step.rows) > 1 and all(one is not None and one.status is RowStatus.FAILED for one in answers)


def _missing(row: Row) -> RowResult:
    return RowResult(row.sequence_id, RowStatus.FAILED, 0, 0, error="the worker's answer lacks this row")


def _error(worker: Worker, result: RowResult) -> str:
    detail = f": {result.error}" if result.error else ""
    return f"{worker.spec.role.value} worker {worker.worker_id} answered {result.status.value}{detail}"
