"""Forms the steps of target workers: a verify group and, in the same step, chunks of prefill."""

from __future__ import annotations

from itertools import islice

from scheduler.confidence import most_promising
from scheduler.config import SchedulerConfig
from scheduler.draft_lengths import DraftLengths
from scheduler.fleet import Fleet
from scheduler.lifecycle import DRAFTED, PREFILLING, Lifecycle
from scheduler.messages import GroupFormed, SendStep
from scheduler.policies import Arrivals, GroupingPolicy, GroupingView
from scheduler.sequence import Sequence
from scheduler.turns import target_may_go
from scheduler.worker_book import InFlightRow, TargetBook, TargetWork


class TargetPlanner:
    """Asks the grouping policy for rows and fits them into pages and packed rows."""

    def __init__(
        self,
        config: SchedulerConfig,
        fleet: Fleet,
        lifecycle: Lifecycle,
        lengths: DraftLengths,
        policy: GroupingPolicy,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._lifecycle = lifecycle
        self._lengths = lengths
        self._policy = policy

    def bound(self, target: TargetBook) -> float:
        """Seconds that a DRAFTED sequence of this target may wait voluntarily."""
        return self._config.wait_bound_steps * target.times.typical

    def deadline(self, target: TargetBook) -> float | None:
        """When a target that waits for more rows must stop waiting."""
        oldest = target.drafted.oldest()
        if oldest is None or target.busy or not target.can_take_step or not target_may_go(target, self._fleet):
            return None
        return oldest.due

    def plan(self, target: TargetBook, step_id: int, now: float) -> SendStep | None:
        """The next step for this worker, or None when it waits or has nothing to do."""
        if not target.can_take_step or not (target.drafted or target.prefilling):
            return None
        if not target_may_go(target, self._fleet):
            return None
        batch_size = self._config.batch_size
        may_grow = target.busy and target.coming.total > 0
        # A second step is queued only when there is enough for it or nothing is on its way that could still join it.
        if may_grow and len(target.drafted) < batch_size:
            return None
        can_prefill = target.can_prefill()
        choice = self._policy.choose(self._view(target, now, may_wait=not can_prefill))
        # With prefill pending, some of the room is kept for it, so that verify groups cannot shut it out.
        room = target.spec.max_packed_rows
        kept = min(target.chunk, room // 2) if can_prefill else 0
        chosen, drafted, left = self._fitting(choice.rows if choice else [], room - kept)
        if may_grow and not chosen:
            return None
        rows: dict[int, InFlightRow] = {}
        work = TargetWork()
        self._add_group(target, chosen, drafted, rows, work)
        group = self._describe(rows, work, choice is not None and choice.forced, now)
        if can_prefill:
            self._add_prefill(target, rows, work, min(target.chunk, left + kept))
        return target.send(step_id, rows, work, now, group) if rows else None

    def _view(self, target: TargetBook, now: float, may_wait: bool) -> GroupingView:
        return GroupingView(
            drafted=target.drafted,
            coming=target.coming,
            verifying=target.verifying,
            batch_size=self._config.batch_size,
            now=now,
            may_wait=may_wait,
            times=target.times,
            plan=target.plan,
            arrivals=lambda: self._arrivals(target, now),
        )

    def _arrivals(self, target: TargetBook, now: float) -> Arrivals | None:
        """The first draft step to bring proposals for this target."""
        first = None
        for draft in self._fleet.drafts.values():
            running = next(iter(draft.outstanding.values()), None)
            if running is None:
                continue
            rows, packed, tokens = 0, 0, 0.0
            for flight in running.rows:
                sequence, length = flight.sequence, flight.row.draft_length
                if length and sequence.target is target and not flight.abandoned:
                    rows += 1
                    packed += 1 + length
                    tokens += self._lengths.expected_tokens(sequence, length)
            seconds = max(0.0, draft.expected_end(running) - now)
            if rows and (first is None or seconds < first.seconds):
                first = Arrivals(seconds, rows, packed, tokens)
        return first

    def _fitting(self, rows: list[Sequence], room: int) -> tuple[list[Sequence], list[int], int]:
        """As many of the rows, in their order, as fit into `room` packed rows, with how many of their draft tokens; and
        the room that is left. Rather than leave rows out, the least promising draft tokens are."""
        drafted = [len(sequence.draft_tokens) for sequence in rows]
        packed = len(rows) + sum(drafted)
        if packed > room:
            rows = rows[:room]
            chances = [
                self._lengths.confidence.chances(sequence.confidences[:length], length)
                for sequence, length in zip(rows, drafted, strict=False)
            ]
            drafted = most_promising(chances, room - len(rows))
            packed = len(rows) + sum(drafted)
        return rows, drafted, room - packed

    def _add_group(
        self,
        target: TargetBook,
        chosen: list[Sequence],
        lengths: list[int],
        rows: dict[int, InFlightRow],
        work: TargetWork,
    ) -> None:
        for sequence, drafted in zip(chosen, lengths, strict=True):
            if sequence.state is not DRAFTED:
                continue  # it lost its place to the pages of an older one
            length = sequence.length
            if target.pages.reserve(sequence.sequence_id, length + drafted) or self._make_room(
                target, sequence, length + drafted, rows
            ):
                row = target.make_row(sequence, length, sequence.draft_tokens[:drafted], choose=True)
                rows[sequence.sequence_id] = InFlightRow(sequence, row)
                work.verify_rows += 1 + drafted
                self._lifecycle.start_verifying(sequence, target)

    def _describe(self, rows: dict[int, InFlightRow], work: TargetWork, forced: bool, now: float) -> GroupFormed | None:
        if not rows:
            return None
        shapes = {(flight.sequence.length, len(flight.row.draft_tokens)) for flight in rows.values()}
        work.equal_length = len(shapes) == 1
        oldest = next(iter(rows.values())).sequence
        return GroupFormed(len(rows), work.equal_length, forced, now - oldest.drafted_at)

    def _add_prefill(self, target: TargetBook, rows: dict[int, InFlightRow], work: TargetWork, budget: int) -> None:
        # A copy, since making room may take some out; each but those in flight takes at least one token of the chunk.
        most = (1 + self._config.steps_in_flight) * target.chunk
        for sequence in list(islice(target.prefilling.values(), most)):
            if budget <= 0:
                break
            if sequence.state is not PREFILLING or sequence.sequence_id in target.in_flight:
                continue
            start = target.kv[sequence.sequence_id].valid
            end = min(sequence.length, start + budget)
            if self._make_room(target, sequence, end, rows):
                budget -= end - start
                work.prefill_rows += end - start
                row = target.make_row(sequence, end, choose=end == sequence.length)
                rows[sequence.sequence_id] = InFlightRow(sequence, row)

    def _make_room(self, target: TargetBook, sequence: Sequence, positions: int, rows: dict[int, InFlightRow]) -> bool:
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
