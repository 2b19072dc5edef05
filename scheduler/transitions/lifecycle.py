"""How sequences move between states and between workers: the one place that changes either."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.messages import FailSequence, FinishReason, FinishSequence, Outcome
from scheduler.state.sequence_record import SequenceState
from scheduler.state.workers import KvMove, Sequence, TargetWorker
from scheduler.transitions.parts import CoreParts
from scheduler.transitions.table import TRANSITIONS, Cause, IllegalTransitionError

# Looked up for every row: names are faster than attributes of the enumeration.
WAITING, PREFILLING = SequenceState.WAITING, SequenceState.PREFILLING
READY, DRAFTING = SequenceState.READY, SequenceState.DRAFTING
DRAFTED, VERIFYING = SequenceState.DRAFTED, SequenceState.VERIFYING
ADMITTED, KV_MISSING = Cause.ADMITTED, Cause.KV_MISSING
DRAFT_WANTED, DRAFT_SENT, DRAFT_SKIPPED = Cause.DRAFT_WANTED, Cause.DRAFT_SENT, Cause.DRAFT_SKIPPED
PROPOSED, VERIFY_SENT = Cause.PROPOSED, Cause.VERIFY_SENT

MAX_MOVES_PER_TARGET = 4
"""Sequences whose KV leaves a draining target at the same time; its other sequences go on decoding there."""


class Lifecycle:
    """Moves sequences, and emits the commands that follow: ends, failures and moves of KV."""

    def __init__(self, parts: CoreParts) -> None:
        self._parts = parts

    # --- states -------------------------------------------------------------------------------------------------------

    def _change(self, sequence: Sequence, cause: Cause) -> None:
        """Changes the state as the table says, and with it the sequence's place in the indexes of its workers.

        Raises IllegalTransitionError when the table does not have such a change.
        """
        before = sequence.state
        try:
            after = TRANSITIONS[before][cause]
        except KeyError:
            name = f"sequence {sequence.sequence_id}"
            raise IllegalTransitionError(f"{name} is {before.value}, which {cause.value!r} cannot change") from None
        target, draft = sequence.target, sequence.draft
        if target is not None:
            target.reindex(sequence, before, after)
        if draft is not None:
            draft.reindex(sequence, before, after)
        sequence.state = after

    # --- rounds -------------------------------------------------------------------------------------------------------

    def begin_round(self, sequence: Sequence, now: float, prepared: Outcome | None = None) -> None:
        """Sends a sequence whose target is up to date to its draft worker, or straight to the target: where no draft is
        wanted, or the draft has `prepared` one.

        A sequence whose target drains moves to another target first, if one has room.
        """
        if self.leave_target(sequence):
            return
        if sequence.draft is not None and sequence.length >= sequence.draft.spec.max_sequence_length:
            self.leave_draft(sequence)
        planned = self.longest_draft(sequence)
        if planned and sequence.request.draft_length is None:
            planned = self._parts.controller.for_round(sequence, planned)
        if planned and sequence.draft is None:
            self._find_draft(sequence)
            planned = min(planned, self.longest_draft(sequence))
        sequence.planned_draft_length = planned
        sequence.wants_draft_kv = planned > 0
        draft = sequence.draft
        if draft is None:
            self.skip_draft(sequence, now)
            return
        kv_lag = draft.update_lagging(sequence)
        if not planned:
            self.skip_draft(sequence, now)
            return
        if prepared is not None and not self._parts.controller.own(sequence).probing:
            tokens = prepared.draft_tokens[: self.longest_draft(sequence)]
            confidences = prepared.confidences[: len(tokens)]
            self.become_drafted(sequence, tokens, len(tokens), now, confidences, Cause.PREPARED)
            return
        flight = draft.in_flight.get(sequence.sequence_id)
        fed = 0 if flight is None or flight.abandoned else len(flight.row.tokens)
        if kv_lag - fed <= draft.max_kv_lag:
            sequence.ready_at = now
            self._change(sequence, DRAFT_WANTED)
        else:
            self.skip_draft(sequence, now)

    def go_on(self, sequence: Sequence) -> None:
        """The next round is a plain one, and its row is with the target already."""
        sequence.planned_draft_length = sequence.requested_draft_length = 0
        sequence.wants_draft_kv = False
        if sequence.draft is not None:
            sequence.draft.update_lagging(sequence)
        if sequence.state is not VERIFYING:
            self._change(sequence, Cause.FOLLOWED)

    def stay_plain(self, sequences: Iterable[Sequence]) -> bool:
        """Whether none of them drafts in its next round, as far as that is known before the present one ends."""
        return not self._parts.fleet.drafts or not any(
            self.longest_draft(one) and not self._parts.controller.stays_plain(one) for one in sequences
        )

    def start_drafting(self, sequence: Sequence) -> None:
        """The step in which the draft proposes is on its way."""
        self._change(sequence, DRAFT_SENT)

    def start_verifying(self, sequence: Sequence) -> None:
        """The step in which the target verifies is on its way."""
        self._change(sequence, VERIFY_SENT)

    def skip_draft(self, sequence: Sequence, now: float) -> None:
        """Goes on with a plain decoding round."""
        self.become_drafted(sequence, (), 0, now, cause=DRAFT_SKIPPED)

    def become_drafted(
        self,
        sequence: Sequence,
        draft_tokens: tuple[int, ...],
        requested: int,
        now: float,
        confidences: bytes = b"",
        cause: Cause = PROPOSED,
    ) -> None:
        """The draft was asked for `requested` tokens. `confidences` has one number for each that came, or is empty."""
        if len(confidences) != len(draft_tokens):
            confidences = b""
        if confidences:
            draft_tokens = draft_tokens[: self._parts.controller.worth_verifying(sequence, confidences)]
        sequence.draft_tokens = draft_tokens
        sequence.confidences = confidences
        sequence.requested_draft_length = requested
        sequence.drafted_at = now
        if sequence.target is not None:
            step_seconds = self._parts.controller.target(sequence.target).typical
            sequence.due = sequence.target.due(now, self._parts.config.wait_bound_steps, step_seconds)
        self._change(sequence, cause)

    def catch_up(self, sequence: Sequence) -> None:
        """Goes back to feeding the target committed tokens, and drops a pending proposal."""
        sequence.draft_tokens = ()
        sequence.outcomes = ()
        if sequence.draft is not None:
            sequence.draft.update_lagging(sequence)
        self._change(sequence, KV_MISSING)

    def drafting_changed(self, target: TargetWorker) -> None:
        """The target begins to draft or ceases to: newcomers that will not draft need no draft KV."""
        for sequence in target.prefilling.values():
            if sequence.wants_draft_kv and sequence.request.draft_length is None:
                sequence.wants_draft_kv = self._parts.controller.newcomer_drafts(target, sequence)
                if sequence.draft is not None:
                    sequence.draft.update_lagging(sequence)

    def longest_draft(self, sequence: Sequence) -> int:
        """Tokens that may be proposed in the sequence's next round, if its draft worker can."""
        if sequence.drafting_refused or sequence.suspected:
            return 0
        requested, target, draft = sequence.request.draft_length, sequence.target, sequence.draft
        length = self._parts.config.draft_length if requested is None else requested
        if length >= (rest := sequence.end - sequence.length):
            length = rest - 1
        if target is not None and length > target.longest_draft:
            length = target.longest_draft
        if draft is not None and length > (rest := draft.spec.max_sequence_length - sequence.length):
            length = max(0, rest)
        return length

    # --- places -------------------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        self._parts.live.sequences[sequence.sequence_id] = sequence
        self._parts.live.waiting.push(sequence)

    def admit(self) -> bool:
        """Lets waiting sequences run, in the order of the waiting queue. Returns whether any was let in."""
        live, admitted = self._parts.live, False
        while self._slot_is_free() and (sequence := live.waiting.first()) is not None:
            if not self.fits_somewhere(sequence):
                self.fail(sequence, self.too_long(sequence))
                continue
            positions = self._next_positions(sequence)
            target = self._pick_target(sequence, positions)
            if target is None:
                break
            live.start(sequence)
            target.place(sequence, positions)
            sequence.target = target
            requested = sequence.request.draft_length is not None
            sequence.wants_draft_kv = self.longest_draft(sequence) > 0 and (
                requested or self._parts.controller.newcomer_drafts(target, sequence)
            )
            if sequence.wants_draft_kv:
                self._find_draft(sequence)
            self._change(sequence, ADMITTED)
            admitted = True
        return admitted

    def _pick_target(self, sequence: Sequence, positions: int) -> TargetWorker | None:
        scope, most = sequence.request.cache_scope, self._parts.max_per_target
        return self._parts.fleet.pick_target(scope, sequence.tokens, positions, most)

    def _next_positions(self, sequence: Sequence) -> int:
        """Positions with which a target takes the sequence in: those of its next two rows. The last token that it may
        get has none."""
        return min(sequence.length + self.longest_draft(sequence) + 1, sequence.end - 1)

    def _slot_is_free(self) -> bool:
        most = self._parts.max_per_target
        if len(self._parts.live.running) >= self._parts.fleet.max_running:
            return False
        targets = self._parts.fleet.targets.values()
        return most is None or any(not target.draining and len(target.sequences) < most for target in targets)

    def fits_somewhere(self, sequence: Sequence) -> bool:
        return sequence.end - 1 <= self._parts.fleet.largest_capacity

    def too_long(self, sequence: Sequence) -> str:
        request = sequence.request
        prompt, most = len(request.prompt), request.max_tokens
        need, limit = sequence.end - 1, self._parts.fleet.largest_capacity
        return f"prompt of {prompt} and max_tokens of {most} need {need} positions, the limit is {limit}"

    def _find_draft(self, sequence: Sequence) -> None:
        """Places the sequence on a draft worker, if one has room."""
        positions = sequence.length + self.longest_draft(sequence)
        draft = self._parts.fleet.pick_draft(sequence.request.cache_scope, sequence.tokens, positions)
        if draft is not None:
            draft.place(sequence, positions)
            draft.reindex(sequence, WAITING, sequence.state)
            sequence.draft = draft

    def leave_draft(self, sequence: Sequence) -> None:
        """Gives up the draft worker. A sequence that was READY or DRAFTING must begin its round again."""
        draft = sequence.draft
        if draft is not None:
            draft.reindex(sequence, sequence.state, WAITING)
            draft.evict(sequence)
            sequence.draft = None

    def leave_target(self, sequence: Sequence) -> bool:
        """Takes the sequence off a draining target, with its KV where that is sooner. False: it stays.

        No row of the sequence may be in flight on its target.
        """
        source = sequence.target
        if source is None or not source.draining:
            return False
        positions = self._next_positions(sequence)
        destination = self._pick_target(sequence, positions)
        if destination is None:
            return False
        valid = source.kv[sequence.sequence_id].valid
        moving, computing = self._parts.controller.relocation_seconds(source, destination, valid)
        with_kv = self._parts.moves.worth_it(valid, moving, computing)
        if with_kv and self._parts.moves.leaving(source) >= MAX_MOVES_PER_TARGET:
            return False
        if with_kv:
            self._move_kv(sequence, source, destination, positions)
        else:
            self._parts.counters.rehomed += 1
            destination.place(sequence, positions)
            self._change_target(sequence, source, destination)
            self.catch_up(sequence)
        return True

    def _move_kv(self, sequence: Sequence, source: TargetWorker, destination: TargetWorker, positions: int) -> None:
        if sequence.draft is not None:
            sequence.draft.update_lagging(sequence)
        destination.place(sequence, positions)
        # Whatever becomes of the move, the destination may hold something to release from now on.
        destination.kv[sequence.sequence_id].opened = True
        self._parts.emit(self._parts.moves.begin(sequence, source, destination))
        self._change(sequence, Cause.KV_LEAVES)

    def arrive(self, move: KvMove, now: float) -> None:
        """The KV of a MOVING sequence has reached its destination."""
        sequence = move.sequence
        self._change_target(sequence, move.source, move.destination)
        move.destination.kv[sequence.sequence_id].valid = move.positions
        if move.positions < sequence.length - 1:
            self.catch_up(sequence)
        else:
            self.begin_round(sequence, now)

    def arrive_without_kv(self, move: KvMove) -> None:
        """The KV of a MOVING sequence did not get through: the destination computes it anew."""
        sequence, destination = move.sequence, move.destination
        self._change_target(sequence, move.source, destination)
        destination.kv[sequence.sequence_id].opened = False
        destination.releases[sequence.sequence_id] = None
        self.catch_up(sequence)

    def _change_target(self, sequence: Sequence, source: TargetWorker, destination: TargetWorker) -> None:
        """Takes the sequence off `source`; it was placed on `destination` before."""
        source.reindex(sequence, sequence.state, WAITING)
        source.evict(sequence)
        sequence.kv_move = None
        sequence.target = destination
        destination.reindex(sequence, WAITING, sequence.state)

    def stay(self, sequence: Sequence, now: float) -> None:
        """The destination of a MOVING sequence is gone."""
        self._parts.moves.abandon(sequence)
        self.begin_round(sequence, now)

    def preempt(self, sequence: Sequence) -> None:
        """Takes the pages of a running sequence for others."""
        self._parts.counters.preemptions += 1
        self.return_to_queue(sequence)

    def return_to_queue(self, sequence: Sequence) -> None:
        """Takes a sequence off its workers. It keeps its tokens, and gets its old place in the queue back."""
        self._change(sequence, Cause.RETURNED)
        self._leave_workers(sequence)
        self._parts.live.waiting.push(sequence)

    def _leave_workers(self, sequence: Sequence) -> None:
        """What no longer runs is placed nowhere."""
        self.leave_draft(sequence)
        move = sequence.kv_move
        if move is not None:
            move.destination.evict(sequence)
            self._parts.moves.abandon(sequence)
        if sequence.target is not None:
            sequence.target.evict(sequence)
            sequence.target = None
        sequence.draft_tokens = ()
        sequence.outcomes = ()
        self._parts.live.stop(sequence)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._end(sequence, Cause.CANCEL if reason is FinishReason.CANCELLED else Cause.ENDED)
        self._parts.emit(FinishSequence(sequence.sequence_id, reason))

    def fail(self, sequence: Sequence, error: str) -> None:
        self._end(sequence, Cause.ERROR)
        self._parts.emit(FailSequence(sequence.sequence_id, error))

    def _end(self, sequence: Sequence, cause: Cause) -> None:
        self._parts.controller.forget(sequence)
        waits = sequence.state is WAITING
        self._change(sequence, cause)
        if waits:
            self._parts.live.waiting.remove(sequence)
        else:
            self._leave_workers(sequence)
        del self._parts.live.sequences[sequence.sequence_id]
