"""Forms the steps of draft workers: proposals for all ready sequences, and in the same step chunks to catch up."""

from __future__ import annotations

from itertools import islice

from scheduler.config import SchedulerConfig
from scheduler.messages import SendStep
from scheduler.speculation.controller import Controller
from scheduler.state.worker_base import DraftWork, InFlightRow
from scheduler.state.workers import STEADY_KV_LAG, DraftWorker, Sequence
from scheduler.transitions.lifecycle import READY, Lifecycle


class DraftPlanner:
    """A draft worker proposes for every READY sequence placed there, oldest first."""

    def __init__(self, config: SchedulerConfig, lifecycle: Lifecycle, controller: Controller) -> None:
        self._proposals_per_step = config.proposals_per_step
        self._steps_in_flight = config.steps_in_flight
        self._batch_size = config.batch_size
        self._draft_ahead = config.draft_ahead
        self._lifecycle = lifecycle
        self._controller = controller

    def plan(self, draft: DraftWorker, step_id: int, now: float) -> SendStep | None:
        """The next step for this worker, or None when it must wait or has nothing to do."""
        draft.changed = draft.watches_targets = False
        if not draft.can_take_step:
            return None
        if not (draft.ready or draft.lagging):
            # What is asked of it meanwhile is queued, and does not wait for long.
            may_prepare = self._draft_ahead and draft.verifying and not draft.outstanding and self._steps_in_flight > 1
            draft.watches_targets = bool(may_prepare)
            return self._prepare(draft, step_id, now) if may_prepare else None
        # A second step is queued only when no sequence that is about to come back could still join it.
        if draft.busy and not draft.works_ahead and draft.verifying and len(draft.ready) < self._proposals_per_step:
            return None
        if self._waits(draft):
            draft.watches_targets = True
            return None
        rows: dict[int, InFlightRow[Sequence]] = {}
        work = DraftWork()
        budget, room = self._propose(draft, rows, work, now)
        if draft.lagging:
            self._catch_up(draft, rows, work, min(budget, room))
        return draft.send(step_id, rows, work, now) if rows else None

    def _waits(self, draft: DraftWorker) -> bool:
        """Whether to wait for a target's answer: one half of its sequences is to be drafted for, the other verified."""
        first = next(iter(draft.ready.values()), None)
        target = None if first is None else first.target
        if target is None or not target.verifying:
            return False
        choice = self._controller.target(target).choices.get(draft.worker_id)
        return choice is not None and choice.length > 0 and 2 * len(draft.ready) < len(target.sequences)

    def _propose(
        self, draft: DraftWorker, rows: dict[int, InFlightRow[Sequence]], work: DraftWork, now: float
    ) -> tuple[int, int]:
        """Adds the proposing rows; returns how many tokens are left for catching up, and in the step."""
        budget, room = draft.chunk, draft.spec.max_num_batched_tokens
        # A copy, since proposing takes them out; those in flight, which are skipped, are fewer than a step's.
        for sequence in list(islice(draft.ready.values(), 3 * self._proposals_per_step)):
            if len(rows) == self._proposals_per_step:
                break
            if sequence.state is not READY or sequence.draft is not draft:
                continue  # it gave its pages to one before it
            before = draft.in_flight.get(sequence.sequence_id)
            if before is not None and not before.row.outcomes:
                continue
            kv_lag = draft.kv_lag(sequence)
            if kv_lag > draft.max_kv_lag or (kv_lag > STEADY_KV_LAG and kv_lag > budget):
                self._lifecycle.skip_draft(sequence, now)
                continue
            if kv_lag > room:
                break
            length = sequence.planned_draft_length
            positions = sequence.length + length
            if not draft.pages.reserve(sequence.sequence_id, positions) and not self._make_room(
                draft, sequence, positions, rows, now
            ):
                continue
            if kv_lag > STEADY_KV_LAG:
                budget -= kv_lag
            room -= kv_lag
            self._lifecycle.start_drafting(sequence)
            row = draft.make_row(sequence, sequence.length, draft_length=length)
            rows[sequence.sequence_id] = InFlightRow(sequence, row, before=before)
            work.add(len(row.tokens), length, row.kv_len)
        return budget, room

    def _prepare(self, draft: DraftWorker, step_id: int, now: float) -> SendStep | None:
        """A step that prepares proposals for the likeliest outcomes of the verifications under way."""
        sequences = [one for one in draft.verifying.values() if self._can_prepare(one, draft)]
        del sequences[self._proposals_per_step :]
        targets = {one.target for one in sequences if one.target is not None}
        preparation = self._controller.preparation(draft, targets, len(sequences)) if targets else None
        if preparation is None:
            return None
        rows: dict[int, InFlightRow[Sequence]] = {}
        work = DraftWork()
        room = draft.spec.max_num_batched_tokens
        for sequence in sequences:
            verified = _verified_tokens(sequence)
            end = sequence.length + len(verified)
            fed = draft.kv_lag(sequence) + len(verified)
            # The longest outcome is followed by a token of the target's own, and then by the proposal.
            longest = min(sequence.end, draft.spec.max_sequence_length) - end - 1
            length = min(preparation.length, longest)
            if fed > room or length < 1 or not draft.pages.reserve(sequence.sequence_id, end):
                continue
            room -= fed
            row = draft.make_row(sequence, sequence.length, verified, length)
            row.outcomes = preparation.outcomes
            work.add_prepared(fed, length, row.outcomes * length, row.kv_len)
            rows[sequence.sequence_id] = InFlightRow(sequence, row)
            sequence.prepared_for = sequence.length
        return draft.send(step_id, rows, work, now) if rows else None

    def _can_prepare(self, sequence: Sequence, draft: DraftWorker) -> bool:
        """Once in a round, for a proposal that the target verifies. While the target has another batch to verify,
        nothing waits for the draft; what a grammar allows after an outcome is not known in advance."""
        target = sequence.target
        return (
            target is not None
            and len(target.sequences) <= self._batch_size
            and sequence.prepared_for != sequence.length
            and not sequence.drafting_refused
            and sequence.request.sampling.grammar is None
            and bool(_verified_tokens(sequence))
            and self._controller.prepares(draft, target)
        )

    def _catch_up(
        self, draft: DraftWorker, rows: dict[int, InFlightRow[Sequence]], work: DraftWork, budget: int
    ) -> None:
        for sequence_id, sequence in draft.lagging.items():
            if budget <= 0:
                break
            if sequence_id in draft.in_flight or sequence_id in rows:
                continue
            tokens = min(draft.kv_lag(sequence), budget)
            end = draft.kv[sequence_id].valid + tokens
            if draft.pages.reserve(sequence_id, end):
                budget -= tokens
                row = draft.make_row(sequence, end)
                rows[sequence_id] = InFlightRow(sequence, row)
                work.add(tokens, 0, row.kv_len)

    def _make_room(
        self, draft: DraftWorker, sequence: Sequence, positions: int, rows: dict[int, InFlightRow[Sequence]], now: float
    ) -> bool:
        """Makes room for a proposal. Where pages are short, the last in rank go without a draft meanwhile."""
        while not draft.pages.reserve(sequence.sequence_id, positions):
            victim = draft.last_idle(sequence, rows)
            if victim is None:
                if draft.has_behind(sequence):
                    return False  # one behind it has a row in flight, and can make room once that is answered
                victim = sequence
            was_ready = victim.state is READY
            self._lifecycle.leave_draft(victim)
            if was_ready:
                self._lifecycle.skip_draft(victim, now)
            if victim is sequence:
                return False
        return True


def _verified_tokens(sequence: Sequence) -> tuple[int, ...]:
    """The draft tokens that the target verifies."""
    flight = None if sequence.target is None else sequence.target.in_flight.get(sequence.sequence_id)
    return () if flight is None or flight.abandoned else flight.row.draft_tokens
