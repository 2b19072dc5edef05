"""Forms the steps of target workers: a verify group and, in the same step, chunks of prefill."""

from __future__ import annotations

from scheduler.config import SchedulerConfig
from scheduler.fleet import Fleet
from scheduler.lifecycle import Lifecycle
from scheduler.messages import GroupFormed, SendStep
from scheduler.policies import GroupingPolicy, GroupingView, equal_lengths
from scheduler.sequence import Sequence, SequenceState
from scheduler.step_times import Acceptance
from scheduler.worker_book import InFlightRow, TargetBook


class TargetPlanner:
    """Asks the grouping policy for rows and fits them into pages and packed rows."""

    def __init__(
        self,
        config: SchedulerConfig,
        fleet: Fleet,
        lifecycle: Lifecycle,
        policy: GroupingPolicy,
        acceptance: Acceptance,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._lifecycle = lifecycle
        self._policy = policy
        self._acceptance = acceptance

    def bound(self, target: TargetBook) -> float:
        """Seconds that a DRAFTED sequence of this target may wait voluntarily."""
        return self._config.wait_bound_steps * target.times.typical

    def deadline(self, target: TargetBook) -> float | None:
        """When a target that waits for more rows must stop waiting."""
        oldest = target.drafted.oldest()
        if oldest is None or target.busy or not target.can_take_step:
            return None
        return oldest.due

    def plan(self, target: TargetBook, step_id: int, now: float) -> SendStep | None:
        """The next step for this worker, or None when it waits or has nothing to do."""
        if not target.can_take_step or not (target.drafted or target.prefilling):
            return None
        batch_size = self._config.batch_size
        may_grow = target.busy and target.coming.total > 0
        # A second step is queued only when it is full or nothing is on its way that could still join it.
        if may_grow and len(target.drafted) < batch_size:
            return None
        can_prefill = target.can_prefill()
        choice = self._policy.choose(self._view(target, now, may_wait=not can_prefill))
        # With prefill pending, some of the room is kept for it, so that verify groups cannot shut it out.
        room = target.spec.max_packed_rows
        kept = min(target.chunk, room // 2) if can_prefill else 0
        chosen, left = _fitting(choice.rows if choice else [], room - kept)
        full = len(chosen) == batch_size or (choice is not None and len(chosen) < len(choice.rows))
        if may_grow and not full:
            return None
        rows: dict[int, InFlightRow] = {}
        self._add_group(target, chosen, rows)
        group = self._describe(rows, choice is not None and choice.forced, now)
        self._add_prefill(target, rows, min(target.chunk, left + kept))
        return target.send(step_id, rows, now, group) if rows else None

    def _view(self, target: TargetBook, now: float, may_wait: bool) -> GroupingView:
        return GroupingView(
            drafted=target.drafted,
            coming=target.coming,
            verifying=target.verifying,
            batch_size=self._config.batch_size,
            now=now,
            may_wait=may_wait,
            times=target.times,
            acceptance=self._acceptance.rate,
            arrivals=lambda: self._arrivals(target, now),
        )

    def _arrivals(self, target: TargetBook, now: float) -> tuple[float, int]:
        seconds, count = 0.0, 0
        for draft in self._fleet.drafts.values():
            running = next(iter(draft.outstanding.values()), None)
            coming = 0 if running is None else running.proposals.get(target.worker_id, 0)
            if running is not None and coming:
                end = max(0.0, draft.expected_end(running) - now)
                if not count or end < seconds:
                    seconds, count = end, coming
        return seconds, count

    def _add_group(self, target: TargetBook, chosen: list[Sequence], rows: dict[int, InFlightRow]) -> None:
        for sequence in chosen:
            if sequence.state is not SequenceState.DRAFTED:
                continue  # it lost its place to the pages of an older one
            if self._reserve(target, sequence, sequence.length + len(sequence.draft_tokens), rows):
                row = target.make_row(sequence, sequence.length, sequence.draft_tokens, choose=True)
                rows[sequence.sequence_id] = InFlightRow(sequence, row)
                self._lifecycle.move(sequence, SequenceState.VERIFYING)

    def _describe(self, rows: dict[int, InFlightRow], forced: bool, now: float) -> GroupFormed | None:
        if not rows:
            return None
        sequences = [flight.sequence for flight in rows.values()]
        waited = now - min(sequence.drafted_at for sequence in sequences)
        return GroupFormed(len(rows), equal_lengths(sequences), forced, waited)

    def _add_prefill(self, target: TargetBook, rows: dict[int, InFlightRow], budget: int) -> None:
        for sequence in list(target.prefilling.values()):
            if budget <= 0:
                break
            if sequence.state is not SequenceState.PREFILLING or sequence.sequence_id in target.in_flight:
                continue
            start = target.kv[sequence.sequence_id].valid
            end = min(sequence.length, start + budget)
            if self._reserve(target, sequence, end, rows):
                budget -= end - start
                row = target.make_row(sequence, end, choose=end == sequence.length)
                rows[sequence.sequence_id] = InFlightRow(sequence, row)

    def _reserve(self, target: TargetBook, sequence: Sequence, positions: int, rows: dict[int, InFlightRow]) -> bool:
        """Makes room for the row, at the cost of the youngest; False when the sequence cannot be part of this step.

        The oldest sequence of a target always gets through, at the latest when the steps in flight are back.
        """
        while not target.pages.reserve(sequence.sequence_id, positions):
            victim = target.youngest_idle(sequence.order, rows)
            if victim is not None:
                self._lifecycle.preempt(victim)
            elif target.has_younger(sequence):
                return False  # a younger one has a row in flight: when it is back, it can make room
            else:
                self._lifecycle.preempt(sequence)
                return False
        return True


def _fitting(rows: list[Sequence], room: int) -> tuple[list[Sequence], int]:
    """As many of the rows, in their order, as fit into `room` packed rows; and the room that is left."""
    chosen = []
    for sequence in rows:
        packed = 1 + len(sequence.draft_tokens)
        if packed > room:
            break
        room -= packed
        chosen.append(sequence)
    return chosen, room
