"""Forms the steps of draft workers: proposals for all that are ready, and catching up beside them."""

from __future__ import annotations

from itertools import islice

from scheduler.config import SchedulerConfig
from scheduler.fleet import Fleet
from scheduler.lifecycle import READY, Lifecycle
from scheduler.messages import SendStep
from scheduler.sequence import Sequence
from scheduler.turns import draft_may_go
from scheduler.worker_book import STEADY_LACK, DraftBook, DraftWork, InFlightRow

_LATENESS = 0.25
"""Of a step's expected seconds, how much later than expected it may still be waited for."""


class DraftPlanner:
    """A draft worker proposes for every READY sequence at home there, oldest first."""

    def __init__(self, config: SchedulerConfig, fleet: Fleet, lifecycle: Lifecycle) -> None:
        self._proposals_per_step = config.proposals_per_step
        self._fleet = fleet
        self._lifecycle = lifecycle

    def plan(self, draft: DraftBook, step_id: int, now: float) -> SendStep | None:
        """The next step for this worker, or None when it must wait or has nothing to do."""
        if not draft.can_take_step or not (draft.ready or draft.lagging) or not draft_may_go(draft, self._fleet):
            return None
        # A second step is queued only when no sequence that is about to come back could still join it.
        if draft.busy and draft.verifying and len(draft.ready) < self._proposals_per_step:
            return None
        if self._waits(draft, now):
            return None
        rows: dict[int, InFlightRow] = {}
        work = DraftWork()
        budget, room = self._propose(draft, rows, work, now)
        if draft.lagging:
            self._catch_up(draft, rows, work, min(budget, room))
        return draft.send(step_id, rows, work, now) if rows else None

    def deadline(self, draft: DraftBook) -> float | None:
        """When a draft that waits for more sequences must stop waiting."""
        return draft.waiting_until if draft_may_go(draft, self._fleet) else None

    def _waits(self, draft: DraftBook, now: float) -> bool:
        """Whether a draft should wait for sequences about to come back, so that its steps are few and full.

        Only where drafting may hold the cell up. A busy one waits for the end of its step, an idle one for that of its
        target's, where this takes no longer than the base cost of the step that it saves.
        """
        first = next(iter(draft.ready.values()), None)
        began = now if draft.waiting_since is None else draft.waiting_since
        draft.stop_waiting()
        if first is None or len(draft.ready) >= self._proposals_per_step:
            return False
        target = first.target
        if target is None or target.plan is None or len(draft.ready) + 0.5 >= target.plan.draft_rows:
            return False
        if draft.busy:
            return True
        end = target.expected_end() if draft.verifying else None
        if end is None or end > began + draft.times.base * first.wished_length:
            return False
        latest = end + _LATENESS * (end - target.running_since)
        if now >= latest:
            return False
        draft.waiting_since, draft.waiting_until = began, latest
        return True

    def _propose(self, draft: DraftBook, rows: dict[int, InFlightRow], work: DraftWork, now: float) -> tuple[int, int]:
        """Adds the proposing rows; returns the catch-up tokens and the packed rows that are left."""
        budget, room = draft.chunk, draft.spec.max_packed_rows
        # A copy, since proposing takes them out; those in flight, which are skipped, are fewer than a step's.
        for sequence in list(islice(draft.ready.values(), 3 * self._proposals_per_step)):
            if len(rows) == self._proposals_per_step:
                break
            if sequence.state is not READY or sequence.draft is not draft:
                continue  # it lost its place to the pages of an older one
            if sequence.sequence_id in draft.in_flight:
                continue
            lack = draft.lack(sequence)
            if lack > draft.most_lack or (lack > STEADY_LACK and lack > budget):
                self._lifecycle.skip_draft(sequence, now)
                continue
            if lack > room:
                break
            length = sequence.wished_length
            positions = sequence.length + length
            if not draft.pages.reserve(sequence.sequence_id, positions) and not self._make_room(
                draft, sequence, positions, rows, now
            ):
                continue
            if lack > STEADY_LACK:
                budget -= lack
            room -= lack
            self._lifecycle.start_drafting(sequence, draft)
            row = draft.make_row(sequence, sequence.length, draft_length=length)
            rows[sequence.sequence_id] = InFlightRow(sequence, row)
            work.add(len(row.tokens), length)
        return budget, room

    def _catch_up(self, draft: DraftBook, rows: dict[int, InFlightRow], work: DraftWork, budget: int) -> None:
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
                work.add(tokens, 0)

    def _make_room(
        self, draft: DraftBook, sequence: Sequence, positions: int, rows: dict[int, InFlightRow], now: float
    ) -> bool:
        """Makes room for a proposal. Where pages are short, the youngest do without a draft until some are free."""
        while not draft.pages.reserve(sequence.sequence_id, positions):
            victim = draft.youngest_idle(sequence.order, rows)
            if victim is None:
                if draft.has_younger(sequence):
                    return False  # it has a row in flight: when that is back, it can make room
                victim = sequence
            was_ready = victim.state is READY
            self._lifecycle.leave_draft(victim)
            if was_ready:
                self._lifecycle.skip_draft(victim, now)
            if victim is sequence:
                return False
        return True
