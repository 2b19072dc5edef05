"""Forms the steps of target workers: a verify group and, in the same step, chunks of prefill."""

from __future__ import annotations

from collections.abc import Iterable

from spool.scheduler.batching.verify_grouping import pick
from spool.scheduler.config import Policy
from spool.scheduler.messages import MAX_SCORED_TOKENS, Row, SendStep
from spool.scheduler.state.worker_records import KvEntry, Work
from spool.scheduler.state.workers import IDLE, PREFILLING, VERIFYING, Sequence, TargetWorker
from spool.scheduler.transitions.lifecycle import Lifecycle


class TargetPlanner:
    """Asks the grouping policy for a verify group, and fits the group into the step's pages and tokens."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._config = lifecycle.config
        self._lifecycle = lifecycle
        self._controller = lifecycle.controller
        self._any_lengths = lifecycle.config.policy in (Policy.AUTO, Policy.RAGGED)
        """Whether the policy has no say in which lengths are verified together."""

    def plan(self, target: TargetWorker, step_id: int) -> SendStep | None:
        """The next step for this worker, or None when it waits or has nothing to do.

        Suspects and the others take turns: a suspect's row waits until no other is in flight, and is then alone.
        """
        target.changed = False
        if len(target.outstanding) >= self._config.steps_in_flight or target.lone_step in target.outstanding:
            return None
        suspect = target.next_suspect() if target.suspects else None
        if suspect is not None and not target.lone_step_was_last:
            if target.in_flight:
                return None
            if (step := self._plan_alone(target, suspect, step_id)) is not None:
                return step
        step = self._plan_group(target, step_id) if target.sequences else None
        if step is not None:
            target.lone_step_was_last = False
        elif suspect is not None and target.lone_step_was_last and not target.in_flight:
            step = self._plan_alone(target, suspect, step_id)
        return step

    def _plan_alone(self, target: TargetWorker, suspect: Sequence, step_id: int) -> SendStep | None:
        rows, work = list[Row](), Work()
        if suspect.state is PREFILLING:
            self._add_prefill(target, [suspect], rows, work, target.chunk)
        else:
            self._add_group(target, [suspect], [0], rows, work)
        if not rows:
            return None
        target.lone_step, target.lone_step_was_last = step_id, True
        return target.send(step_id, rows, work)

    def _plan_group(self, target: TargetWorker, step_id: int) -> SendStep | None:
        batch_size = self._config.batch_size
        can_prefill = any(sequence_id not in target.in_flight for sequence_id in target.prefilling)
        victims, available = self._victims(target), target.idle
        if victims:
            available = {one: each for one, each in available.items() if one not in victims}
        followers = [] if victims else self._followers(target)
        if not (available or target.prefilling or followers):
            return None
        verifying = 0 if followers else target.verifying  # whoever does not follow ends
        policy, groups = self._config.policy, target.groups
        picked, forced = pick(policy, available, batch_size, groups, verifying, may_wait=not can_prefill)
        # With prefill pending, some of the room is kept for it, so that verify groups cannot shut it out.
        room = target.spec.max_num_batched_tokens
        kept = min(target.chunk, room // 2) if target.prefilling else 0
        chosen, lengths, left = self._fitting(picked, room - kept)
        rows, work = list[Row](), Work()
        self._add_group(target, chosen, lengths, rows, work)
        all_fit = len(rows) == len(chosen)
        if can_prefill or ((chosen or followers) and target.prefilling):
            # Each but those in flight takes at least one token of the chunk.
            most = (1 + self._config.steps_in_flight) * target.chunk
            staying = [one for number, one in target.prefilling.items() if number not in victims]
            # Of the keys, those first that were served least for their weight; of equal ones, who began first.
            next_ones = sorted(staying, key=lambda sequence: sequence.account.served)[:most]
            all_fit &= self._add_prefill(target, next_ones, rows, work, min(target.chunk, left + kept))
        # As long as one finds no pages, the others must come to rest, so that their pages can be taken.
        if followers and all_fit and (chosen or not available):
            left = room - work.decoded - work.proposed - work.fed
            self._add_followers(target, followers[: batch_size - len(chosen)], rows, work, left)
        if not rows:
            return None
        bound = self._config.wait_bound_steps * target.figures.step.seconds
        return target.send(step_id, rows, work, forced, _wait_seconds(target, rows, bound) if work.drafted else 0.0)

    def _victims(self, target: TargetWorker) -> set[int]:
        """Sequences that are preempted for a waiting one, once no row of them is in flight."""
        preemption = self._lifecycle.preemption
        if preemption is None or preemption.target is not target:
            return set()
        return {one.sequence_id for one in preemption.victims}

    def _followers(self, target: TargetWorker) -> list[Sequence]:
        """The sequences of the step sent last whose next row can be sent now, in which the worker feeds what that step
        samples. All that go on must, else they would be in two steps from then on where one would do. A policy that
        groups by length must wait for the answer, unless nothing is proposed that makes lengths differ."""
        leaving = target.draining and not self._lifecycle.fleet.ends_here(target)
        if leaving or not target.outstanding:
            return []
        followers = [one for one in target.can_follow() if one.length + 1 < one.end]
        return followers if self._any_lengths or not any(map(self._controller.longest, followers)) else []

    @staticmethod
    def _fitting(sequences: list[Sequence], room: int) -> tuple[list[Sequence], list[int], int]:
        """Fits a group into `room` tokens: its sequences, how many proposed tokens each verifies at most, and the room
        that is left.

        The last proposed tokens of all are left out before any sequence is.
        """
        lengths = [sequence.verify for sequence in sequences]
        batched = len(sequences) + sum(lengths)
        if batched > room:
            sequences = sequences[:room]
            lengths = _leading(lengths[:room], room - len(sequences))
            batched = len(sequences) + sum(lengths)
        return sequences, lengths, room - batched

    def _add_group(
        self, target: TargetWorker, chosen: list[Sequence], lengths: list[int], rows: list[Row], work: Work
    ) -> None:
        for sequence, verify in zip(chosen, lengths, strict=True):
            if sequence.state is not IDLE:
                continue  # it gave its pages to one before it
            sequence_id, length = sequence.sequence_id, sequence.length
            entry = target.kv[sequence_id]
            short = length + verify > entry.room
            if short and not self._make_room(target, sequence, entry, length + verify):
                continue
            draft_length, lookup_length = self._controller.to_propose(sequence)
            row = target.make_row(sequence, entry, entry.valid, length, verify, draft_length, True)
            row.lookup_length, row.looked_up = lookup_length, sequence.looked_up
            row.drafted = sequence.drafted if sequence.drafted < verify else verify
            rows.append(row)
            work.add(verify, row.drafted, row.kv_len)
            del (target.suspects if sequence.suspected else target.idle)[sequence_id]
            sequence.state = VERIFYING
            target.verifying += 1

    def _add_followers(
        self, target: TargetWorker, followers: list[Sequence], rows: list[Row], work: Work, room: int
    ) -> None:
        """A sequence without pages for all that its row may feed waits for the answer instead: then others can make
        room."""
        for sequence in followers:
            sequence_id, length = sequence.sequence_id, sequence.length
            before = target.in_flight[sequence_id]
            # For each token that the row before accepts, one more may lie behind the end of the sequence: the commit
            # leaves out what is verified there, and `end` counts its pages.
            verify = min(before.asks, sequence.end - length - 2)
            most = 1 + verify
            end = length + before.verify + most
            if most > room or end > target.spec.max_sequence_length:
                continue
            if target.reserve(target.kv[sequence_id], end):
                draft_length, lookup_length = self._controller.to_propose(sequence)
                digest = sequence.tokens.digests[length]
                row = Row(sequence_id, length, digest, (), length + 1, verify, draft_length, True, before)
                row.follows, row.lookup_length = True, lookup_length
                row.looked_up = before.lookup_length != 0
                row.drafted = before.draft_length if before.draft_length < verify else verify
                target.in_flight[sequence_id] = row
                rows.append(row)
                room -= most
                work.add(verify, row.drafted, length)

    def _add_prefill(
        self, target: TargetWorker, sequences: Iterable[Sequence], rows: list[Row], work: Work, budget: int
    ) -> bool:
        """Returns whether pages were found for all."""
        all_fit = True
        for sequence in sequences:
            if budget <= 0:
                break
            if sequence.state is not PREFILLING or (start := target.prefill_from(sequence)) is None:
                continue
            room = budget if sequence.request.prompt_logprobs is None else min(budget, MAX_SCORED_TOKENS)
            end = min(sequence.length, start + room)
            entry, before = target.kv[sequence.sequence_id], target.in_flight.get(sequence.sequence_id)
            if target.reserve(entry, end) or (before is None and self._make_room(target, sequence, entry, end)):
                budget -= end - start
                work.fed += end - start
                samples = end == sequence.length
                if samples:
                    draft_length, lookup_length = self._controller.to_propose(sequence)
                else:
                    draft_length, lookup_length = self._controller.to_expect(sequence), None
                row = target.make_row(sequence, entry, start, end, 0, draft_length, samples)
                row.lookup_length = lookup_length
                work.kv += row.kv_len
                row.scoring = sequence.scoring(row.kv_len, end)
                rows.append(row)
            else:
                all_fit &= before is not None
        return all_fit

    def _make_room(self, target: TargetWorker, sequence: Sequence, entry: KvEntry, positions: int) -> bool:
        """Makes room for the row, at the expense of the last in precedence; False: the sequence must miss this step.

        The first in precedence of a target's sequences gets through at the latest when the steps in flight are back.
        """
        while not target.reserve(entry, positions):
            victim = target.last_resting(sequence)
            if victim is None and target.has_behind(sequence):
                return False  # one behind it has a row in flight, and can make room once that is answered
            self._lifecycle.preempt(victim or sequence)
            if victim is None:
                return False
        return True


def _wait_seconds(target: TargetWorker, rows: list[Row], bound: float) -> float:
    """How long the step may wait for proposals of the target's draft worker. For lengths that were chosen, as long as
    it pays to; for others, which are to be drafted in any case, at least `bound`."""
    choice = target.figures.choice
    if target.grant is None:
        return 0.0
    if choice is None:
        return bound
    fixed = (row.verify and target.sequences[row.sequence_id].request.draft_length is not None for row in rows)
    return bound if choice.wait < bound and any(fixed) else choice.wait


def _leading(lengths: list[int], room: int) -> list[int]:
    """How many leading tokens of each proposal to verify if only `room` tokens can be: those of the first places, which
    are the likeliest to be accepted."""
    kept = [0] * len(lengths)
    for place in range(max(lengths)):
        for index, length in enumerate(lengths):
            if place < length and room > 0:
                kept[index] += 1
                room -= 1
    return kept
