"""Applies workers' answers, row by row: progress, commits, and the handling of rows that failed."""

from __future__ import annotations

from spool.scheduler.messages import DraftingReport, EmitTokens, Row, RowResult, RowStatus, StepCompleted
from spool.scheduler.state.worker_records import Step
from spool.scheduler.state.workers import PREFILLING, VERIFYING, Sequence, TargetWorker, change_state
from spool.scheduler.transitions.blame import clear, suspect
from spool.scheduler.transitions.lifecycle import Lifecycle

_OK = RowStatus.OK

MAX_TARGET_FAILURES = 5
"""Consecutive rows of a sequence that a target may answer with lost KV before the sequence fails."""


class Rounds:
    """Applies one answered step at a time."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._controller = lifecycle.controller
        self._counters = lifecycle.counters
        self._emit = lifecycle.emit
        self._shapes: list[tuple[int, int]] = []
        """Of the rows of the step's verify group: where each ended, and how many proposed tokens it verified."""

    def apply(self, target: TargetWorker, event: StepCompleted, now: float) -> None:
        step = target.outstanding.pop(event.step_id, None)
        if step is None:
            return
        target.changed = True
        results = event.results
        self._learn_costs(target, step, event)
        # Where the whole step failed, one of its rows, it is not known which, has failed the others.
        together = len(results) > 1 and all(result.status is RowStatus.FAILED for result in results)
        for row, result in zip(step.rows, results, strict=True):
            target.row_answered(row)
            if not row.abandoned:
                self._apply_row(target, target.sequences[row.sequence_id], row, result, together, now)
        self._count_group()
        if event.drafting is not None:
            self._take_report(target, step, event.drafting, now)

    def _learn_costs(self, target: TargetWorker, step: Step, event: StepCompleted) -> None:
        work, verified = step.work, 0
        for row, result in zip(step.rows, event.results, strict=True):
            if row.verify:
                verified += result.verified if 0 < result.verified <= row.verify else 0
            if row.drafted:
                work.starting += not (row.abandoned or target.sequences[row.sequence_id].proposed_before)
            if work.fed:
                # KV that a worker took over from other sequences took no time, nor did a chunk that was sent before an
                # answer told that the worker has KV of its tokens.
                known = 0 if row.abandoned else target.kv[row.sequence_id].valid - row.kv_len
                work.fed -= min(work.fed, max(result.reused, 0) + max(known, 0), len(row.tokens))
        drafting_seconds = event.drafting_seconds
        self._controller.step(target, work, verified, event.seconds - drafting_seconds, drafting_seconds)

    def _count_group(self) -> None:
        shapes, counters = self._shapes, self._counters
        if len(shapes) > 1:
            if shapes.count(shapes[0]) == len(shapes):
                counters.equal_length_groups += 1
            else:
                counters.ragged_groups += 1
                counters.ragged_rows += len(shapes)
        shapes.clear()

    def _take_report(self, target: TargetWorker, step: Step, report: DraftingReport, now: float) -> None:
        for sequence_id in report.refused:
            if (sequence := target.sequences.get(sequence_id)) is not None:
                sequence.drafting_refused = True
        if step.grant is target.grant:
            self._controller.served(target, report)
        self._lifecycle.assignment.take_report(target, step.grant, report, now)

    def _apply_row(
        self, target: TargetWorker, sequence: Sequence, row: Row, result: RowResult, together: bool, now: float
    ) -> None:
        if result.status is not _OK or result.kv_len < row.end:
            target.abandon_rows(sequence.sequence_id)
        if row.scoring is not None and result.status is _OK:
            if tuple(logprobs.token_id for logprobs in result.prompt_logprobs) != row.scoring.tokens:
                error = f"{len(row.scoring.tokens)} log probabilities of prompt tokens were asked for, others came"
                self._lifecycle.fail(sequence, f"target worker {target.worker_id}: {error}")
                return
            if row.scoring.tokens:
                sequence.fingerprint = target.spec.fingerprint
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
                change_state(sequence, PREFILLING)
            case _:
                self._lifecycle.fail(sequence, _error(target, result))

    def _commit(self, target: TargetWorker, sequence: Sequence, row: Row, result: RowResult, now: float) -> None:
        accepted, verified, tokens = result.accepted, result.verified, result.tokens
        if not 0 <= accepted <= verified <= row.verify or len(tokens) != accepted + 1:
            error = f"{accepted} of {verified} proposed tokens accepted and {len(tokens)} tokens returned do not match"
            self._lifecycle.fail(sequence, f"target worker {target.worker_id}: {error}")
            return
        sequence_id, before = sequence.sequence_id, sequence.length
        entry, fed = target.kv[sequence_id], before + accepted
        entry.valid = fed if result.kv_len >= fed else max(0, result.kv_len)
        sequence.target_failures = 0
        if sequence.state is VERIFYING:
            self._shapes.append((before, verified))
            self._controller.round(target, sequence, row, result)
            sequence.proposed_before = row.drafted > 0 and (verified > 0 or target.grant is None)
            lengths, asked = self._counters.draft_lengths, 0 if sequence.request.expected_output else row.drafted
            lengths[asked] = lengths.get(asked, 0) + 1
        sequence.fingerprint = target.spec.fingerprint
        emitted, reason = sequence.commit(tokens)
        count = len(emitted)
        if sequence.prompt_left:
            _serve_prompt(sequence, row, result, fed)
        sequence.account.serve_output(count, now)
        kept = accepted if accepted < count else count
        digests, logprobs = result.logits_digests, result.logprobs
        if count < len(tokens):
            digests, logprobs = digests[:count], logprobs[:count]
        emission = EmitTokens(sequence_id, emitted, verified, kept, digests, logprobs, target_id=target.worker_id)
        emission.source = result.source
        if sequence.cached or sequence.prompt_logprobs:
            emission.prompt_logprobs, emission.cached = tuple(sequence.prompt_logprobs), sequence.cached
            sequence.prompt_logprobs, sequence.cached = [], 0
        self._emit(emission)
        if reason is not None:
            self._lifecycle.finish(sequence, reason)
            return
        if sequence.suspected:
            clear(sequence)
        length, later = sequence.length, target.in_flight.get(sequence_id)
        if entry.valid < length - 1:
            target.abandon_rows(sequence_id)
            change_state(sequence, PREFILLING)
        elif later is not None and later.follows and not later.abandoned:
            self._lifecycle.go_on(sequence, later)
        else:
            self._lifecycle.begin_round(sequence, row)

    def _lost_kv(self, target: TargetWorker, sequence: Sequence, result: RowResult) -> None:
        sequence.target_failures += 1
        if sequence.target_failures > MAX_TARGET_FAILURES:
            times = f"{sequence.target_failures} times without progress"
            self._lifecycle.fail(sequence, f"{_error(target, result)}, {times}")
        else:
            change_state(sequence, PREFILLING)

    def _out_of_pages(self, target: TargetWorker, sequence: Sequence, result: RowResult) -> None:
        """The worker has fewer pages than it said. The last in rank makes room; a single sequence tries again."""
        if len(target.sequences) == 1:
            self._lost_kv(target, sequence, result)
            return
        victim = target.last_resting(sequence) or sequence
        self._lifecycle.preempt(victim)
        if victim is not sequence:
            change_state(sequence, PREFILLING)


def _serve_prompt(sequence: Sequence, row: Row, result: RowResult, computed: int) -> None:
    """The target has computed the first `computed` committed tokens. Computing a token again is no further service."""
    prompt = len(sequence.request.prompt)
    before = prompt - sequence.prompt_left
    tokens = min(prompt, computed) - before
    if tokens > 0:
        sequence.prompt_left -= tokens
        sequence.account.serve_prompt(tokens)
        if result.reused > 0 and not sequence.request.committed_output:
            reused = min(prompt, row.kv_len + result.reused) - max(before, row.kv_len)
            sequence.cached += max(0, reused)


def _usable_length(sequence: Sequence, result: RowResult) -> int:
    """How much of the target's KV can be gone on from, if it is of the sequence's committed tokens: at least one logit
    is still to come, and more where the prompt's log probabilities are wanted."""
    held, tokens = result.kv_len, sequence.tokens
    if not 0 <= held <= sequence.length or tokens.digests[held] != result.prefix_digest:
        return 0
    return min(held, sequence.length - 1, sequence.score_from)


def _error(target: TargetWorker, result: RowResult) -> str:
    detail = f": {result.error}" if result.error else ""
    return f"target worker {target.worker_id} answered {result.status.value}{detail}"
