"""Forms the steps of target workers: a verify group and, in the same step, chunks of prefill."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from scheduler.batching.trimming import most_promising
from scheduler.batching.verify_grouping import GroupingPolicy, GroupingView
from scheduler.config import SchedulerConfig
from scheduler.messages import GroupFormed, Row, SendStep
from scheduler.speculation.controller import Controller
from scheduler.state.worker_base import InFlightRow, TargetWork
from scheduler.state.workers import Sequence, TargetWorker
from scheduler.transitions.lifecycle import DRAFTED, PREFILLING, Lifecycle


class TargetPlanner:
    """Asks the grouping policy for a verify group, and fits the group into the step's pages and tokens."""

    def __init__(
        self,
        config: SchedulerConfig,
        lifecycle: Lifecycle,
        controller: Controller,
        policy: GroupingPolicy,
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._controller = controller
        self._policy = policy

    def bound(self, target: TargetWorker) -> float:
        """Seconds that a DRAFTED sequence of this target may wait voluntarily."""
        return self._config.wait_bound_steps * self._controller.target(target).typical

    def plan(self, target: TargetWorker, step_id: int, now: float) -> SendStep | None:
        """The next step for this worker, or None when it waits or has nothing to do.

        Suspects and the others take turns: a suspect's row waits until no other is in flight, and is then alone.
        """
        target.changed, target.waits_until = False, None
        if not target.can_take_step or target.lone_step in target.outstanding:
            return None
        suspect = target.next_suspect() if target.suspects else None
        if suspect is not None and not target.lone_step_was_last:
            step = None if target.busy else self._plan_alone(target, suspect, step_id, now)
            if step is not None or target.busy:
                return step
        step = self._plan_group(target, step_id, now) if target.sequences else None
        if step is not None:
            target.lone_step_was_last = False
        elif suspect is not None and target.lone_step_was_last and not target.busy:
            step = self._plan_alone(target, suspect, step_id, now)
        if step is None and (oldest := target.drafted.oldest()) is not None:
            target.waits_until = oldest.due
        return step

    def _plan_alone(self, target: TargetWorker, suspect: Sequence, step_id: int, now: float) -> SendStep | None:
        rows: dict[int, InFlightRow[Sequence]] = {}
        work = TargetWork()
        if suspect.state is PREFILLING:
            self._add_prefill(target, [suspect], rows, work, target.chunk)
        else:
            self._add_group(target, [suspect], [0], rows, work)
        if not rows:
            return None
        group = None if work.prefill_tokens else self._describe(list(rows.values()), False, now)
        target.lone_step, target.lone_step_was_last = step_id, True
        return target.send(step_id, rows, work, now, group)

    def _plan_group(self, target: TargetWorker, step_id: int, now: float) -> SendStep | None:
        batch_size = self._config.batch_size
        may_grow = target.busy and target.coming.total > 0
        # A second step is queued only if it is full, or no sequence is on its way that could still join it.
        if may_grow and len(target.drafted) < batch_size:
            return None
        can_prefill = target.can_prefill()
        followers = self._followers(target)
        if not (target.drafted or target.prefilling or followers):
            return None
        view = self._view(target, now, may_wait=not can_prefill)
        if followers:
            view.verifying = 0  # whoever does not follow ends
        choice = self._policy.pick(view)
        # With prefill pending, some of the room is kept for it, so that verify groups cannot shut it out.
        room = target.spec.max_num_batched_tokens
        kept = min(target.chunk, room // 2) if target.prefilling else 0
        chosen, drafted, left = self._fitting(choice.sequences if choice else [], room - kept)
        if may_grow and not chosen:
            return None
        rows: dict[int, InFlightRow[Sequence]] = {}
        work = TargetWork()
        self._add_group(target, chosen, drafted, rows, work)
        group, all_fit = list(rows.values()), len(rows) == len(chosen)
        if can_prefill or ((chosen or followers) and target.prefilling):
            # Each but those in flight takes at least one token of the chunk.
            most = (1 + self._config.steps_in_flight) * target.chunk
            next_ones = list(islice(target.prefilling.values(), most))
            all_fit &= self._add_prefill(target, next_ones, rows, work, min(target.chunk, left + kept))
        # As long as one finds no pages, the others must come to rest, so that their pages can be taken.
        if all_fit and (chosen or not target.drafted):
            most = min(batch_size - len(chosen), room - work.verify_tokens - work.prefill_tokens)
            group += self._add_followers(target, followers[:most], rows, work)
        shape = self._describe(group, choice is not None and choice.forced, now)
        return target.send(step_id, rows, work, now, shape) if rows else None

    def _followers(self, target: TargetWorker) -> list[Sequence]:
        """The sequences of the step sent last whose next row can be sent now, in which the worker feeds what that step
        samples. All that go on must, else they would be in two steps from then on where one would do."""
        if target.draining:
            return []
        followers = [one for one in target.can_follow() if one.length + 1 < one.end]
        return followers if self._lifecycle.stay_plain(followers) else []

    def _view(self, target: TargetWorker, now: float, may_wait: bool) -> GroupingView:
        return GroupingView(
            drafted=target.drafted,
            coming=target.coming,
            verifying=target.verifying,
            batch_size=self._config.batch_size,
            now=now,
            may_wait=may_wait,
            drafting=self._controller.target(target).drafting,
        )

    def _fitting(self, sequences: list[Sequence], room: int) -> tuple[list[Sequence], list[int], int]:
        """Fits a group into `room` tokens: its sequences, how many draft tokens of each, and the room that is left.

        The least promising draft tokens are left out before any sequence is.
        """
        drafted = [len(sequence.draft_tokens) for sequence in sequences]
        batched = len(sequences) + sum(drafted)
        if batched > room:
            sequences = sequences[:room]
            chances = [
                self._controller.chances(sequence, sequence.confidences[:length], length)
                for sequence, length in zip(sequences, drafted, strict=False)
            ]
            drafted = most_promising(chances, room - len(sequences))
            batched = len(sequences) + sum(drafted)
        return sequences, drafted, room - batched

    def _add_group(
        self,
        target: TargetWorker,
        chosen: list[Sequence],
        lengths: list[int],
        rows: dict[int, InFlightRow[Sequence]],
        work: TargetWork,
    ) -> None:
        for sequence, drafted in zip(chosen, lengths, strict=True):
            if sequence.state is not DRAFTED:
                continue  # it gave its pages to one before it
            length = sequence.length
            if target.pages.reserve(sequence.sequence_id, length + drafted) or self._make_room(
                target, sequence, length + drafted, rows
            ):
                row = target.make_row(sequence, length, sequence.draft_tokens[:drafted], sample=True)
                before = target.in_flight.get(sequence.sequence_id)
                rows[sequence.sequence_id] = InFlightRow(sequence, row, before=before)
                work.verify_tokens += 1 + drafted
                work.kv_tokens += row.kv_len
                self._lifecycle.start_verifying(sequence)

    def _add_followers(
        self,
        target: TargetWorker,
        followers: list[Sequence],
        rows: dict[int, InFlightRow[Sequence]],
        work: TargetWork,
    ) -> list[InFlightRow[Sequence]]:
        """Returns the rows added. A sequence without a page for its next token waits for the answer instead: then
        others can make room."""
        added = []
        for sequence in followers:
            length = sequence.length
            if target.pages.reserve(sequence.sequence_id, length + 1):
                row = Row(sequence.sequence_id, length, sequence.tokens.digest(length), (), sample=True, follows=True)
                before = target.in_flight[sequence.sequence_id]
                rows[sequence.sequence_id] = flight = InFlightRow(sequence, row, before=before)
                added.append(flight)
                work.verify_tokens += 1
                work.kv_tokens += length
        return added

    def _describe(self, group: list[InFlightRow[Sequence]], forced: bool, now: float) -> GroupFormed | None:
        if not group:
            return None
        first = group[0].row
        end, drafted = first.end, len(first.draft_tokens)
        equal = all(one.row.end == end and len(one.row.draft_tokens) == drafted for one in group)
        waited = 0.0 if first.follows else now - group[0].sequence.drafted_at
        return GroupFormed(len(group), equal, forced, waited)

    def _add_prefill(
        self,
        target: TargetWorker,
        sequences: Iterable[Sequence],
        rows: dict[int, InFlightRow[Sequence]],
        work: TargetWork,
        budget: int,
    ) -> bool:
        """Returns whether pages were found for all."""
        all_fit = True
        for sequence in sequences:
            if budget <= 0:
                break
            if sequence.state is not PREFILLING or (start := target.prefill_from(sequence)) is None:
                continue
            end = min(sequence.length, start + budget)
            before = target.in_flight.get(sequence.sequence_id)
            if target.pages.reserve(sequence.sequence_id, end) or (
                before is None and self._make_room(target, sequence, end, rows)
            ):
                budget -= end - start
                work.prefill_tokens += end - start
                row = target.make_row(sequence, end, sample=end == sequence.length, after=before)
                work.kv_tokens += row.kv_len
                row.scoring = sequence.scoring(row.kv_len, end)
                rows[sequence.sequence_id] = InFlightRow(sequence, row, before=before)
            else:
                all_fit &= before is not None
        return all_fit

    def _make_room(
        self, target: TargetWorker, sequence: Sequence, positions: int, rows: dict[int, InFlightRow[Sequence]]
    ) -> bool:
        """Makes room for the row, at the expense of the last in rank; False when the sequence must miss this step.

        The first in rank of a target's sequences always gets through, at the latest when the steps in flight are back.
        """
        while not target.pages.reserve(sequence.sequence_id, positions):
            victim = target.last_idle(sequence, rows)
            if victim is not None:
                self._lifecycle.preempt(victim)
            elif target.has_behind(sequence):
                return False  # one behind it has a row in flight, and can make room once that is answered
            else:
                self._lifecycle.preempt(sequence)
                return False
        return True
