"""Forms the steps of draft workers: proposals for all ready sequences, and in the same step chunks to catch up."""

from __future__ import annotations

from itertools import islice

from scheduler.messages import Row, SendStep
from scheduler.state.worker_records import KvEntry, Work
from scheduler.state.workers import DRAFTING, READY, STEADY_KV_LAG, VERIFYING, DraftWorker, Sequence, TargetWorker
from scheduler.transitions.lifecycle import Lifecycle


class DraftPlanner:
    """A draft worker proposes for every READY sequence placed there, oldest first."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._config = lifecycle.config
        self._proposals_per_step = lifecycle.config.proposals_per_step
        self._lifecycle = lifecycle
        self._controller = lifecycle.controller

    def plan(self, draft: DraftWorker, step_id: int, now: float) -> SendStep | None:
        """The next step for this worker, or None when it must wait or has nothing to do."""
        draft.changed = draft.watches_targets = False
        if not draft.can_take_step:
            return None
        rows, work = list[Row](), Work()
        if not (draft.ready or draft.lagging):
            # What is asked of it meanwhile is queued, and does not wait for long.
            if self._config.draft_ahead and draft.verifying and not draft.outstanding:
                draft.watches_targets = self._config.steps_in_flight > 1
            if draft.watches_targets:
                self._prepare(draft, rows, work)
            return draft.send(step_id, rows, work, now, None) if rows else None
        # A second step is queued only when no sequence that is about to come back could still join it. What prepares
        # ends as soon as another step waits.
        could_join = draft.in_flight and draft.verifying and len(draft.ready) < self._proposals_per_step
        if could_join and not all(row.outcomes for step in draft.outstanding.values() for row in step.rows):
            return None
        if self._waits(draft):
            draft.watches_targets = True
            return None
        budget = self._propose(draft, rows, work, now)
        for sequence_id, sequence in draft.lagging.items():
            if budget <= 0:
                break
            if sequence_id in draft.in_flight:
                continue
            entry, tokens = draft.kv[sequence_id], min(draft.kv_lag(sequence), budget)
            end = entry.valid + tokens
            if draft.reserve(entry, end):
                budget -= tokens
                row = draft.make_row(sequence, entry, entry.valid, end)
                rows.append(row)
                work.fed += tokens
                work.kv += row.kv_len
        return draft.send(step_id, rows, work, now, None) if rows else None

    def _waits(self, draft: DraftWorker) -> bool:
        """Whether to wait for a target's answer: one half of its sequences is to be drafted for, the other verified."""
        first = next(iter(draft.ready.values()), None)
        target = None if first is None else first.target
        if target is None or not target.verifying:
            return False
        choice = target.figures.choices.get(draft.worker_id)
        return choice is not None and choice.length > 0 and 2 * len(draft.ready) < len(target.sequences)

    def _propose(self, draft: DraftWorker, rows: list[Row], work: Work, now: float) -> int:
        """Adds the proposing rows; returns how many tokens are left for catching up."""
        budget = draft.chunk
        room = before = draft.spec.max_num_batched_tokens
        # A copy, since proposing takes them out; those in flight, which are skipped, are fewer than a step's.
        for sequence in list(islice(draft.ready.values(), 3 * self._proposals_per_step)):
            if len(rows) == self._proposals_per_step:
                break
            if sequence.state is not READY or sequence.draft is not draft:
                continue  # it gave its pages to one before it
            sequence_id, length, planned = sequence.sequence_id, sequence.length, sequence.planned_draft_length
            if (flight := draft.in_flight.get(sequence_id)) is not None and not flight.outcomes:
                continue
            entry = draft.kv[sequence_id]
            kv_lag = length - entry.valid
            if kv_lag < 1:
                kv_lag = 1
            if kv_lag > draft.max_kv_lag or (kv_lag > STEADY_KV_LAG and kv_lag > budget):
                self._lifecycle.skip_draft(sequence, now)
                continue
            if kv_lag > room:
                break
            short = length + planned > entry.room
            if short and not self._make_room(draft, sequence, entry, length + planned, now):
                continue
            if kv_lag > STEADY_KV_LAG:
                budget -= kv_lag
            room -= kv_lag
            del draft.ready[sequence_id]
            sequence.state = DRAFTING
            row = draft.make_row(sequence, entry, entry.valid, length, (), planned)
            rows.append(row)
            work.decoded += planned
            work.kv += row.kv_len * planned
            if planned > work.passes:
                work.passes = planned
        work.fed = before - room - len(rows)  # each row proposes from the last token that it feeds
        return min(budget, room)

    def _prepare(self, draft: DraftWorker, rows: list[Row], work: Work) -> None:
        """Adds rows that prepare proposals for the likeliest outcomes of the verifications under way.

        Each takes a pass over the tokens fed, and one for each token of its proposals.
        """
        verifying = [one for one in draft.sequences.values() if one.state is VERIFYING]
        found = [(one, one.target, _verified_tokens(one, one.target)) for one in verifying if one.target is not None]
        able = [each for each in found if each[2] and self._can_prepare(each[0], draft, each[1])]
        del able[self._proposals_per_step :]
        targets = {target for _, target, _ in able}
        preparation = self._controller.preparation(draft, targets, len(able)) if able else None
        if preparation is None:
            return
        room = draft.spec.max_num_batched_tokens
        for sequence, _, verified in able:
            entry = draft.kv[sequence.sequence_id]
            end = sequence.length + len(verified)
            fed = draft.kv_lag(sequence) + len(verified)
            # The longest outcome is followed by a token of the target's own, and then by the proposal.
            longest = min(sequence.end, draft.spec.max_sequence_length) - end - 1
            length = min(preparation.length, longest)
            if fed > room or length < 1 or not draft.reserve(entry, end):
                continue
            room -= fed
            row = draft.make_row(sequence, entry, entry.valid, sequence.length, verified, length)
            row.outcomes = preparation.outcomes
            proposed = row.outcomes * length
            work.passes = max(work.passes, 1 + length)
            work.kv += row.kv_len * (1 + proposed)
            work.decoded += proposed
            work.fed += fed
            rows.append(row)
            sequence.prepared_for = sequence.length

    def _can_prepare(self, sequence: Sequence, draft: DraftWorker, target: TargetWorker) -> bool:
        """Once in a round, for a proposal that the target verifies. While the target has another batch to verify,
        nothing waits for the draft; what a grammar allows after an outcome is not known in advance."""
        return (
            len(target.sequences) <= self._config.batch_size
            and sequence.prepared_for != sequence.length
            and not sequence.drafting_refused
            and sequence.request.sampling.grammar is None
            and self._controller.prepares(draft, target)
        )

    def _make_room(self, draft: DraftWorker, sequence: Sequence, entry: KvEntry, positions: int, now: float) -> bool:
        """Makes room for a proposal. Where pages are short, the last in rank go without a draft meanwhile."""
        while not draft.reserve(entry, positions):
            victim = draft.last_idle(sequence)
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


def _verified_tokens(sequence: Sequence, target: TargetWorker) -> tuple[int, ...]:
    """The draft tokens that the target verifies."""
    row = target.in_flight.get(sequence.sequence_id)
    return () if row is None or row.abandoned else row.draft_tokens
