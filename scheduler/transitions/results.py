"""Applies workers' answers, row by row: progress, commits, and the handling of rows that failed."""

from __future__ import annotations

from scheduler.messages import EmitTokens, Row, RowResult, RowStatus, StepCompleted
from scheduler.state.worker_records import KvEntry, Work
from scheduler.state.workers import (
    DRAFTING,
    READY,
    STEADY_KV_LAG,
    VERIFYING,
    DraftWorker,
    Sequence,
    TargetWorker,
    Worker,
)
from scheduler.transitions.blame import clear, suspect
from scheduler.transitions.lifecycle import Lifecycle

_OK = RowStatus.OK

MAX_TARGET_FAILURES = 5
"""Consecutive rows of a sequence that a target may answer with lost KV before the sequence fails."""
MAX_DRAFT_FAILURES = 3
"""Consecutive failures of a sequence on draft workers before it goes on without a draft."""


class Rounds:
    """Applies one answered step at a time."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._controller = lifecycle.controller
        self._draft_lengths = lifecycle.counters.draft_lengths
        self._emit = lifecycle.emit

    def apply(self, worker: Worker, event: StepCompleted, now: float) -> None:
        step = worker.outstanding.pop(event.step_id, None)
        if step is None:
            return
        worker.changed = True
        in_flight, results = worker.in_flight, event.results
        for row, result in zip(step.rows, results, strict=True):
            if result.reused > 0:
                # Prefix KV that a worker took over from other sequences took no time.
                step.work.leave_out(min(result.reused, len(row.tokens)))
        # Where the whole step failed, one of its rows, it is not known which, has failed the others.
        together = len(results) > 1 and all(result.status is RowStatus.FAILED for result in results)
        elapsed = None if step.sent_at is None else now - step.sent_at
        if isinstance(worker, TargetWorker):
            for row in step.rows if step.work.fed else ():
                # Nor did a chunk that was sent before an answer told that the worker has KV of its tokens.
                if not row.abandoned and (known := worker.kv[row.sequence_id].valid - row.kv_len) > 0:
                    step.work.leave_out(min(known, len(row.tokens)))
            if worker.drafts_itself:
                step.work.decoded += sum(len(row.draft_tokens) for row in step.rows if row.follows)
            if self._controller.target_step(worker, step.work, event.seconds, elapsed):
                self._lifecycle.drafting_changed(worker)
            for row, result in zip(step.rows, results, strict=True):
                if row.before is None and in_flight[row.sequence_id] is row:
                    del in_flight[row.sequence_id]  # as `row_answered` does: most rows are alone
                else:
                    worker.row_answered(row)
                if not row.abandoned:
                    self._target_row(worker, worker.sequences[row.sequence_id], row, result, together, now)
            return
        if any(row.outcomes and _ended_early(row, result) for row, result in zip(step.rows, results, strict=True)):
            step.work = Work()
        self._controller.draft_step(worker, step.work, event.seconds, elapsed)
        for row, result in zip(step.rows, results, strict=True):
            wanted = not row.abandoned
            if row.before is None and in_flight[row.sequence_id] is row:
                del in_flight[row.sequence_id]
            else:
                worker.row_answered(row)
            if not row.abandoned:
                self._draft_row(worker, worker.sequences[row.sequence_id], row, result, together, now)
            elif wanted and (sequence := worker.sequences[row.sequence_id]).state is DRAFTING:
                # Its proposal overtook the answer to what was prepared, and does not count.
                self._lifecycle.begin_round(sequence, now)

    # --- draft rows ---------------------------------------------------------------------------------------------------

    def _draft_row(
        self, draft: DraftWorker, sequence: Sequence, row: Row, result: RowResult, together: bool, now: float
    ) -> None:
        entry, ahead = draft.kv[sequence.sequence_id], result.kv_len - row.end
        usual = result.status is _OK and sequence.state is DRAFTING and ahead >= 0 and not row.outcomes
        if usual and not sequence.drafting_refused:
            # A proposal.
            entry.valid, sequence.draft_failures = row.end, 0
            self._take_proposal(entry, sequence, row, result, ahead, now)
            if draft.lagging:
                draft.update_lagging(sequence)
            return
        match result.status:
            case RowStatus.OK if row.outcomes:
                # The verification that the draft has prepared for may be over by now.
                sequence.draft_failures, held = 0, max(0, result.kv_len)
                if sequence.state is VERIFYING and sequence.length == row.end:
                    entry.valid, entry.ahead = min(row.end, held), max(0, min(ahead, len(row.draft_tokens)))
                    sequence.outcomes = result.outcomes
                else:
                    entry.valid = min(max(entry.valid, row.end), held)
            case RowStatus.OK:
                sequence.draft_failures = 0 if ahead >= 0 else sequence.draft_failures + 1
                entry.valid = max(0, min(row.end, result.kv_len))
                if not row.draft_length:
                    entry.valid = max(entry.valid, _agreed_length(sequence, result))
                if sequence.state is DRAFTING:
                    self._take_proposal(entry, sequence, row, result, ahead, now)
            case RowStatus.KV_MISMATCH:
                sequence.draft_failures += 1
                entry.valid, entry.ahead = _agreed_length(sequence, result), 0
            case RowStatus.OUT_OF_PAGES:
                sequence.draft_failures += 1
                self._lifecycle.leave_draft(sequence)
            case status if status is RowStatus.UNKNOWN_SEQUENCE or together:
                sequence.draft_failures += 1
                entry.lose()
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

    def _take_proposal(
        self, entry: KvEntry, sequence: Sequence, row: Row, result: RowResult, ahead: int, now: float
    ) -> None:
        if sequence.proposals_owed:
            sequence.proposals_owed -= 1
        length = row.draft_length
        proposal = result.tokens[:length]
        last = len(proposal) - 1
        if ahead > last:
            ahead = last
        entry.ahead = ahead if ahead > 0 else 0
        self._lifecycle.become_drafted(sequence, proposal, length, now)

    # --- target rows --------------------------------------------------------------------------------------------------

    def _target_row(
        self, target: TargetWorker, sequence: Sequence, row: Row, result: RowResult, together: bool, now: float
    ) -> None:
        if result.status is not _OK or result.kv_len < row.end:
            target.abandon_rows(sequence.sequence_id)
        if row.scoring is not None and result.status is _OK:
            if tuple(logprobs.token_id for logprobs in result.prompt_logprobs) != row.scoring.tokens:
                error = f"{len(row.scoring.tokens)} log probabilities of prompt tokens were asked for, others came"
                self._lifecycle.fail(sequence, f"target worker {target.worker_id}: {error}")
                return
            sequence.take_scores(result.prompt_logprobs)
        if row.sample and result.status is _OK:
            self._commit(target, sequence, row, result, now)
            return
        entry = target.kv[sequence.sequence_id]
        match result.status:
            case RowStatus.OK if result.kv_len >= row.end:
                entry.valid = max(row.end, _usable_length(sequence, result))
                _serve_prompt(sequence, row, result, entry.valid)
            case RowStatus.OK | RowStatus.KV_MISMATCH | RowStatus.VOID:
                entry.valid = _usable_length(sequence, result)
                self._lost_kv(target, sequence, result)
            case RowStatus.UNKNOWN_SEQUENCE:
                entry.lose()
                self._lost_kv(target, sequence, result)
            case RowStatus.OUT_OF_PAGES:
                entry.valid = row.kv_len
                self._out_of_pages(target, sequence, result)
            case _ if together:
                entry.lose()
                suspect(sequence, self._emit)
                self._lifecycle.catch_up(sequence)
            case _:
                self._lifecycle.fail(sequence, _error(target, result))

    def _commit(self, target: TargetWorker, sequence: Sequence, row: Row, result: RowResult, now: float) -> None:
        accepted, drafted, tokens = result.accepted, len(row.draft_tokens), result.tokens
        legal = 0 <= accepted <= drafted and len(tokens) == accepted + 1
        if not legal or (accepted and tokens[:accepted] != row.draft_tokens[:accepted]):
            error = f"{accepted} of {drafted} draft tokens accepted and {len(tokens)} tokens returned do not match"
            self._lifecycle.fail(sequence, f"target worker {target.worker_id}: {error}")
            return
        sequence_id, before, draft = sequence.sequence_id, sequence.length, sequence.draft
        entry, fed = target.kv[sequence_id], before + accepted
        entry.valid = fed if result.kv_len >= fed else max(0, result.kv_len)
        sequence.target_failures = 0
        sequence.draft_tokens = ()
        if sequence.state is VERIFYING:
            self._controller.observe(sequence, accepted)
            requested = sequence.requested_draft_length
            self._draft_lengths[requested] = self._draft_lengths.get(requested, 0) + 1
        emitted, reason = sequence.commit(tokens)
        count = len(emitted)
        if sequence.prompt_left:
            _serve_prompt(sequence, row, result, fed)
        sequence.account.serve_output(count, now)
        kept = accepted if accepted < count else count
        digests, logprobs = result.logits_digests, result.logprobs
        if count < len(tokens):
            digests, logprobs = digests[:count], logprobs[:count]
        emission = EmitTokens(sequence_id, emitted, drafted, kept, digests, logprobs, target_id=target.worker_id)
        if sequence.cached or sequence.prompt_logprobs:
            emission.prompt_logprobs, emission.cached = tuple(sequence.prompt_logprobs), sequence.cached
            sequence.prompt_logprobs, sequence.cached = [], 0
        self._emit(emission)
        if reason is not None:
            self._lifecycle.finish(sequence, reason)
            return
        if sequence.suspected:
            clear(sequence)
        if row.draft_length:
            sequence.outcomes = result.outcomes
        prepared = sequence.prepared(accepted, tokens[-1]) if sequence.outcomes else None
        if draft is not None:
            draft.kv[sequence_id].settle_proposal(accepted)
            if drafted and sequence.prepared_for == before:
                self._controller.looked_for(draft, prepared is not None)
        length, later = sequence.length, target.in_flight.get(sequence_id)
        if entry.valid < length - 1:
            target.abandon_rows(sequence_id)
            self._lifecycle.catch_up(sequence)
        elif later is not None and later.follows and not later.abandoned:
            self._lifecycle.go_on(sequence, later, prepared)
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
        victim = target.last_idle(sequence) or sequence
        self._lifecycle.preempt(victim)
        if victim is not sequence:
            self._lifecycle.catch_up(sequence)


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
    if 0 <= result.kv_len <= sequence.length and sequence.tokens.digests[result.kv_len] == result.prefix_digest:
        return result.kv_len
    return 0


def _usable_length(sequence: Sequence, result: RowResult) -> int:
    """How much of the target's KV can be gone on from: at least one logit is still to come, and more where the prompt's
    log probabilities are wanted."""
    return min(_agreed_length(sequence, result), sequence.length - 1, sequence.score_from)


def _ended_early(row: Row, result: RowResult) -> bool:
    """Whether a row has prepared fewer or shorter proposals than it was to: another step waited, or it failed."""
    return sum(len(outcome.draft_tokens) for outcome in result.outcomes) < row.outcomes * row.draft_length


def _error(worker: Worker, result: RowResult) -> str:
    detail = f": {result.error}" if result.error else ""
    return f"{worker.spec.role.value} worker {worker.worker_id} answered {result.status.value}{detail}"
