"""Forms the steps of draft workers: proposals for all that are ready, and catching up beside them."""

from __future__ import annotations

from scheduler.config import SchedulerConfig
from scheduler.lifecycle import Lifecycle
from scheduler.messages import SendStep
from scheduler.sequence import Sequence, SequenceState
from scheduler.worker_book import STEADY_LACK, DraftBook, InFlightRow


class DraftPlanner:
    """A draft worker proposes for every READY sequence at home there, oldest first."""

    def __init__(self, config: SchedulerConfig, lifecycle: Lifecycle) -> None:
        self._proposals_per_step = config.proposals_per_step
        self._lifecycle = lifecycle

    def plan(self, draft: DraftBook, step_id: int, now: float) -> SendStep | None:
        """The next step for this worker, or None when it must wait or has nothing to do."""
        if not draft.can_take_step or not (draft.ready or draft.lagging):
            return None
        # A second step is queued only when no sequence that is about to come back could still join it.
        if draft.busy and draft.verifying and len(draft.ready) < self._proposals_per_step:
            return None
        rows: dict[int, InFlightRow] = {}
        budget, room = self._propose(draft, rows, now)
        self._catch_up(draft, rows, min(budget, room))
        return draft.send(step_id, rows, now) if rows else None

    def _propose(self, draft: DraftBook, rows: dict[int, InFlightRow], now: float) -> tuple[int, int]:
        """Adds the proposing rows; returns the catch-up tokens and the packed rows that are left."""
        budget, room = draft.chunk, draft.spec.max_packed_rows
        for sequence in list(draft.ready.values()):
            if len(rows) == self._proposals_per_step:
                break
            if sequence.state is not SequenceState.READY or sequence.draft is not draft:
                continue  # it lost its place to the pages of an older one
            if sequence.sequence_id in draft.in_flight:
                continue
            lack = draft.lack(sequence)
            if not draft.can_propose_after(lack) or (lack > STEADY_LACK and lack > budget):
                self._lifecycle.skip_draft(sequence, now)
                continue
            if lack > room:
                break
            length = self._lifecycle.draft_length(sequence)
            if not self._reserve(draft, sequence, sequence.length + length, rows, now):
                continue
            if lack > STEADY_LACK:
                budget -= lack
            room -= lack
            self._lifecycle.move(sequence, SequenceState.DRAFTING)
            row = draft.make_row(sequence, sequence.length, draft_length=length)
            rows[sequence.sequence_id] = InFlightRow(sequence, row)
        return budget, room

    def _catch_up(self, draft: DraftBook, rows: dict[int, InFlightRow], budget: int) -> None:
        for sequence_id, sequence in draft.lagging.items():
            if budget <= 0:
                break
            if sequence_id in draft.in_flight or sequence_id in rows:
                continue
            tokens = min(draft.lack(sequence), budget)
            end = draft.kv[sequence_id].valid + tokens
            if draft.pages.reserve(sequence_id, end):
                budget -= tokens
                rows[sequence_id] = InFlightRow(sequence, draft.make_row(sequence, end))

    def _reserve(
        self, draft: DraftBook, sequence: Sequence, positions: int, rows: dict[int, InFlightRow], now: float
    ) -> bool:
        """Makes room for a proposal. Where pages are short, the youngest do without a draft until some are free."""
        while not draft.pages.reserve(sequence.sequence_id, positions):
            victim = draft.youngest_idle(sequence.order, rows)
            if victim is None:
                if draft.has_younger(sequence):
                    return False  # it has a row in flight: when that is back, it can make room
                victim = sequence
            was_ready = victim.state is SequenceState.READY
            self._lifecycle.leave_draft(victim)
            if was_ready:
                self._lifecycle.skip_draft(victim, now)
            if victim is sequence:
                return False
        return True
