"""How sequences move between states and between workers."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.config import KvMovement, Policy, SchedulerConfig
from scheduler.messages import (
    Command,
    FailSequence,
    FinishReason,
    FinishSequence,
    KvMoved,
    MoveKv,
    Outcome,
    Row,
    SequenceState,
    WorkerDrained,
)
from scheduler.speculation.controller import Controller
from scheduler.state.fleet import Fleet
from scheduler.state.live_set import LiveSet
from scheduler.state.workers import (
    DRAFTED,
    DRAFTING,
    ENDED,
    MOVING,
    PREFILLING,
    READY,
    STEADY_KV_LAG,
    VERIFYING,
    WAITING,
    KvMove,
    Sequence,
    TargetWorker,
    change_state,
)
from scheduler.statistics import Counters
from scheduler.transitions.making_way import Way, find_way

MAX_MOVES_PER_TARGET = 4
"""Sequences whose KV leaves a draining target at the same time; its other sequences go on decoding there."""


class Lifecycle:
    """Moves sequences, and emits the commands that follow: ends, failures and moves of KV."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.live = LiveSet(config.keys)
        self.fleet = Fleet(config)
        self.counters = Counters()
        self.controller = Controller(config, self.fleet, self.counters)
        self.commands: list[Command] = []
        self.emit = self.commands.append
        self._auto = config.policy is Policy.AUTO
        self._moves: dict[int, KvMove] = {}
        """Those that were not answered yet."""
        self._last_move_id = 0
        self.way: Way | None = None
        """That of the sequence which waits first, while rows of those that leave are in flight: they get no others."""
        self._draining: dict[str, TargetWorker] = {}
        self._max_per_target = config.batch_size if config.policy is Policy.EQSPEC else None
        """Sequences on one target: EQSPEC verifies all of them together."""

    # --- rounds -------------------------------------------------------------------------------------------------------

    def begin_round(self, sequence: Sequence, now: float, prepared: Outcome | None = None) -> None:
        """Sends a sequence whose target is up to date to its draft worker, or straight to the target: where no draft is
        wanted, or the draft or the target's own draft has `prepared` one.

        A sequence whose target drains moves to another target first, if one has room.
        """
        target, draft = sequence.target, sequence.draft
        if target is not None and target.draining and self.leave_target(sequence):
            return
        if sequence.request.expected_output:
            self._propose_expected(sequence, now)
            return
        if target is not None and target.drafts_itself:
            self._take_own_proposal(sequence, now, prepared)
            return
        if draft is not None and sequence.length >= draft.spec.max_sequence_length:
            self.leave_draft(sequence)
        planned = self.longest_draft(sequence)
        if planned and self._auto and sequence.request.draft_length is None:
            planned = self.controller.for_round(sequence, planned)
        if planned and sequence.draft is None:
            self._find_draft(sequence)
            planned = min(planned, self.longest_draft(sequence))
        sequence.planned_draft_length = planned
        sequence.wants_draft_kv = planned > 0
        draft, sequence_id = sequence.draft, sequence.sequence_id
        kv_lag = 0 if draft is None else sequence.length - draft.kv[sequence_id].valid
        if draft is not None and (kv_lag > STEADY_KV_LAG or draft.lagging):
            draft.update_lagging(sequence)
        if draft is None or not planned:
            self.skip_draft(sequence, now)
            return
        if prepared is not None and not sequence.probing:
            tokens = prepared.draft_tokens[: self.longest_draft(sequence)]
            self.become_drafted(sequence, tokens, len(tokens), now)
            return
        row = draft.in_flight.get(sequence_id)
        fed = 0 if row is None or row.abandoned else len(row.tokens)
        if max(kv_lag, 1) - fed > draft.max_kv_lag:
            self.skip_draft(sequence, now)
        elif sequence.state is VERIFYING and target is not None:
            # As `change_state` does: most rounds begin here.
            sequence.state, target.changed, draft.changed = READY, True, True
            target.verifying -= 1
            target.coming += 1
            draft.verifying -= 1
            draft.ready[sequence_id] = sequence
        else:
            change_state(sequence, READY)

    def _propose_expected(self, sequence: Sequence, now: float) -> None:
        """Nothing is learnt from it, so no token counts as requested."""
        self.leave_draft(sequence)
        sequence.planned_draft_length, sequence.wants_draft_kv = 0, False
        rest = sequence.request.expected_output[sequence.length - len(sequence.request.prompt) :]
        self.become_drafted(sequence, rest[: self.longest_draft(sequence)], 0, now)

    def _take_own_proposal(self, sequence: Sequence, now: float, prepared: Outcome | None) -> None:
        """Of a target that drafts itself, which came with the answer; None where there is none, as after a move."""
        self.leave_draft(sequence)
        sequence.planned_draft_length, sequence.wants_draft_kv = 0, False
        proposal = () if prepared is None else prepared.draft_tokens
        tokens = proposal[: self.longest_draft(sequence)]
        self.become_drafted(sequence, tokens, len(tokens), now)

    def to_propose(self, sequence: Sequence) -> int:
        """Tokens that its target is to propose itself with the sequence's next row, for the round after it."""
        if sequence.request.expected_output:
            return 0
        length = min(self.longest_draft(sequence), sequence.end - sequence.length - 2)
        if length > 0 and self._auto and sequence.request.draft_length is None:
            length = self.controller.for_round(sequence, length)
        return max(0, length)

    def go_on(self, sequence: Sequence, row: Row, prepared: Outcome | None) -> None:
        """The row of the next round is with the target already, and follows: it verifies what the target's own draft
        has `prepared`, if anything."""
        sequence.draft_tokens = () if prepared is None else prepared.draft_tokens
        row.kv_len, row.end, row.draft_tokens = sequence.length - 1, sequence.length, sequence.draft_tokens
        row.prefix_digest = sequence.tokens.digests[row.kv_len]
        sequence.planned_draft_length, sequence.requested_draft_length = 0, len(sequence.draft_tokens)
        sequence.wants_draft_kv = False
        if sequence.draft is not None:
            sequence.draft.update_lagging(sequence)
        if sequence.state is not VERIFYING:
            change_state(sequence, VERIFYING)

    def knows_next(self, target: TargetWorker, sequences: Iterable[Sequence]) -> bool:
        """Whether the target knows at the end of the round under way what each of them feeds in the next: no draft
        worker proposes, as far as that is known, and no policy has a say in who is verified together."""
        if target.drafts_itself:
            free = self.config.policy in (Policy.AUTO, Policy.RAGGED)
            return free and not any(one.request.expected_output for one in sequences)
        return all(self.controller.stays_plain(one) or not self.longest_draft(one) for one in sequences)

    def skip_draft(self, sequence: Sequence, now: float) -> None:
        """Goes on with a plain decoding round."""
        self.become_drafted(sequence, (), 0, now)

    def become_drafted(self, sequence: Sequence, draft_tokens: tuple[int, ...], requested: int, now: float) -> None:
        """The draft was asked for `requested` tokens."""
        sequence.draft_tokens = draft_tokens
        sequence.requested_draft_length = requested
        sequence.drafted_at = now
        target = sequence.target
        if target is not None:
            sequence.due = target.due(now)
        if sequence.state is DRAFTING and target is not None:
            # As `change_state` does: most proposals come here. No suspect is drafted for.
            sequence.state, target.changed = DRAFTED, True
            target.coming -= 1
            target.drafted[sequence.sequence_id] = sequence
        else:
            change_state(sequence, DRAFTED)

    def catch_up(self, sequence: Sequence) -> None:
        """Goes back to feeding the target committed tokens, and drops a pending proposal."""
        sequence.draft_tokens, sequence.outcomes = (), ()
        if sequence.draft is not None:
            sequence.draft.update_lagging(sequence)
        change_state(sequence, PREFILLING)

    def drafting_changed(self, target: TargetWorker) -> None:
        """The target begins to draft or ceases to: newcomers that will not draft need no draft KV."""
        for sequence in target.prefilling.values():
            if sequence.wants_draft_kv and sequence.request.draft_length is None:
                sequence.wants_draft_kv = self.controller.newcomer_drafts(target, sequence)
                if sequence.draft is not None:
                    sequence.draft.update_lagging(sequence)

    def longest_draft(self, sequence: Sequence) -> int:
        """Tokens that may be proposed in the sequence's next round, if its draft worker can."""
        if sequence.drafting_refused or sequence.suspected:
            return 0
        requested, target, draft = sequence.request.draft_length, sequence.target, sequence.draft
        length = self.config.draft_length if requested is None else requested
        if length >= (rest := sequence.end - sequence.length):
            length = rest - 1
        if target is not None and length > target.longest_draft:
            length = target.longest_draft
        if draft is not None and length > (rest := draft.spec.max_sequence_length - sequence.length):
            length = max(0, rest)
        return length

    # --- places -------------------------------------------------------------------------------------------------------

    def admit(self) -> bool:
        """Lets waiting sequences run, in the order of the waiting queue. Returns whether any was let in."""
        live, admitted, before = self.live, False, self.way
        self.way = None
        while live.waiting and (sequence := live.waiting.first()) is not None:
            if self.fleet.accepting and not self.fits_somewhere(sequence):
                self.fail(sequence, self.too_long(sequence))
                continue
            positions = self._next_positions(sequence)
            target = self._take_place(sequence, positions)
            if target is None:
                break
            live.start(sequence)
            target.place(sequence, positions)
            sequence.target = target
            requested = sequence.request.draft_length is not None
            proposed = target.drafts_itself or bool(sequence.request.expected_output)
            drafts = self.longest_draft(sequence) > 0 and not proposed
            sequence.wants_draft_kv = drafts and (requested or self.controller.newcomer_drafts(target, sequence))
            if sequence.wants_draft_kv:
                self._find_draft(sequence)
            change_state(sequence, PREFILLING)
            admitted = True
        if before is not None:
            before.target.changed = True
        return admitted

    def _take_place(self, sequence: Sequence, positions: int) -> TargetWorker | None:
        """The target for a waiting sequence; those of a key that runs more may make way for it. None: it waits."""
        target = self._pick_target(sequence, positions) if self._slot_is_free() else None
        if target is None:
            targets = self.fleet.targets.values()
            way = find_way(sequence, positions, self.live, targets, self.fleet.max_running, self._max_per_target)
            if way is not None and way.busy:
                self.way = way
            elif way is not None:
                for other in way.leaving:
                    self.preempt(other)
                target = self._pick_target(sequence, positions)
        return target

    def _pick_target(self, sequence: Sequence, positions: int) -> TargetWorker | None:
        scope = sequence.request.cache_scope
        return self.fleet.pick_target(scope, sequence.tokens, positions, self._max_per_target)

    def _next_positions(self, sequence: Sequence) -> int:
        """Positions with which a target takes the sequence in: those of its next two rows. The last token that it may
        get has none."""
        return min(sequence.length + self.longest_draft(sequence) + 1, sequence.end - 1)

    def _slot_is_free(self) -> bool:
        most = self._max_per_target
        if len(self.live.running) >= self.fleet.max_running:
            return False
        targets = self.fleet.targets.values()
        return most is None or any(not target.draining and len(target.sequences) < most for target in targets)

    def fits_somewhere(self, sequence: Sequence) -> bool:
        return sequence.end - 1 <= self.fleet.largest_capacity

    def too_long(self, sequence: Sequence) -> str:
        request = sequence.request
        prompt, most = len(request.prompt), request.max_tokens
        need, limit = sequence.end - 1, self.fleet.largest_capacity
        return f"prompt of {prompt} and max_tokens of {most} need {need} positions, the limit is {limit}"

    def _find_draft(self, sequence: Sequence) -> None:
        """Places the sequence on a draft worker, if one has room."""
        positions = sequence.length + self.longest_draft(sequence)
        draft = self.fleet.pick_draft(sequence.request.cache_scope, sequence.tokens, positions)
        if draft is not None:
            draft.place(sequence, positions)
            draft.index(sequence, sequence.state, 1)
            sequence.draft = draft

    def leave_draft(self, sequence: Sequence) -> None:
        """Gives up the draft worker. A sequence that was READY or DRAFTING must begin its round again."""
        draft = sequence.draft
        if draft is not None:
            draft.index(sequence, sequence.state, -1)
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
        moving, computing = self.controller.relocation_seconds(source, destination, valid)
        movement = self.config.kv_movement
        sooner = moving < computing if movement is KvMovement.AUTO else movement is KvMovement.ALWAYS
        if not (valid > 0 and sooner):
            self.counters.moves.rehomed += 1
            destination.place(sequence, positions)
            self._change_target(sequence, source, destination)
            self.catch_up(sequence)
            return True
        if sum(move.source is source and not move.abandoned for move in self._moves.values()) >= MAX_MOVES_PER_TARGET:
            return False
        if sequence.draft is not None:
            sequence.draft.update_lagging(sequence)
        destination.place(sequence, positions)
        # Whatever becomes of the move, the destination may hold something to release from now on.
        destination.kv[sequence.sequence_id].opened = True
        self._last_move_id += 1
        move = KvMove(self._last_move_id, sequence, source, destination, valid)
        self._moves[move.move_id] = sequence.kv_move = move
        tokens, ids = sequence.tokens, (source.worker_id, destination.worker_id)
        self.emit(MoveKv(move.move_id, *ids, tuple(tokens.tokens[:valid]), tokens.digests[valid], sequence.request))
        change_state(sequence, MOVING)
        return True

    def moved(self, event: KvMoved, now: float) -> None:
        """The answer to a `MoveKv`."""
        move = self._moves.pop(event.move_id, None)
        if move is None:
            return
        sequence, destination, totals = move.sequence, move.destination, self.counters.moves
        if event.moved:
            self.controller.kv_moved(move.positions, event.seconds)
            totals.moves += 1
            totals.positions += move.positions
            totals.bytes += event.size
            totals.seconds += event.seconds
        else:
            totals.failed += 1
        if move.abandoned:
            # The KV that arrived is not needed any more: the destination releases it.
            destination.free_pages += move.pages
            destination.pages_of_moves -= move.pages
            destination.changed = True
            if sequence.sequence_id not in destination.sequences:
                destination.releases[sequence.sequence_id] = None
            return
        self._change_target(sequence, move.source, destination)
        entry = destination.kv[sequence.sequence_id]
        if event.moved:
            entry.valid = move.positions
        else:
            entry.opened = False
            destination.releases[sequence.sequence_id] = None
        if entry.valid < sequence.length - 1:
            self.catch_up(sequence)
        else:
            self.begin_round(sequence, now)

    def _abandon_move(self, sequence: Sequence) -> None:
        """The sequence no longer needs its move. The destination keeps pages for the KV until the move is answered."""
        move = sequence.kv_move
        if move is not None:
            move.abandoned, sequence.kv_move = True, None
            move.pages = move.destination.pages_for(move.positions)
            move.destination.free_pages -= move.pages
            move.destination.pages_of_moves += move.pages

    def _change_target(self, sequence: Sequence, source: TargetWorker, destination: TargetWorker) -> None:
        """Takes the sequence off `source`; it was placed on `destination` before."""
        source.index(sequence, sequence.state, -1)
        source.evict(sequence)
        sequence.kv_move = None
        sequence.target = destination
        destination.index(sequence, sequence.state, 1)

    def drain(self, worker_id: str) -> None:
        """Sequences leave the target between two rounds, when no row of them is in flight. Until then, and while no
        other target has room, they go on where they are."""
        target = self.fleet.targets.get(worker_id)
        if target is None:
            self.emit(WorkerDrained(worker_id))
            return
        self.fleet.drain(target)
        self._draining[worker_id] = target
        for sequence in list(target.sequences.values()):
            untouched = not target.kv[sequence.sequence_id].valid and sequence.sequence_id not in target.in_flight
            if sequence.state is PREFILLING and untouched:
                self.leave_target(sequence)

    def report_drained(self) -> None:
        """Reports, once each, draining targets that hold nothing any more or are gone."""
        for worker_id, target in list(self._draining.items()):
            gone = self.fleet.targets.get(worker_id) is not target
            if gone or not (target.sequences or target.outstanding or target.releases):
                del self._draining[worker_id]
                self.emit(WorkerDrained(worker_id))

    def lose_target(self, target: TargetWorker, now: float) -> None:
        """The target is gone: its sequences return to the queue with their tokens, and moves to it end."""
        for sequence in list(target.sequences.values()):
            if sequence.target is target:
                self.return_to_queue(sequence)
            else:
                self._abandon_move(sequence)
                self.begin_round(sequence, now)

    def preempt(self, sequence: Sequence) -> None:
        """Takes the pages of a running sequence for others."""
        self.counters.preemptions += 1
        self.return_to_queue(sequence)

    def return_to_queue(self, sequence: Sequence) -> None:
        """Takes a sequence off its workers. It keeps its tokens, and gets its old place in the queue back."""
        self._leave_workers(sequence, WAITING)
        self.live.waiting.push(sequence)

    def _leave_workers(self, sequence: Sequence, state: SequenceState) -> None:
        """What no longer runs is placed nowhere."""
        self.leave_draft(sequence)
        move, target = sequence.kv_move, sequence.target
        if move is not None:
            move.destination.evict(sequence)
            self._abandon_move(sequence)
        if target is not None:
            target.index(sequence, sequence.state, -1)
            target.evict(sequence)
        sequence.target, sequence.state = None, state
        sequence.draft_tokens, sequence.outcomes = (), ()
        self.live.stop(sequence)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._end(sequence)
        self.emit(FinishSequence(sequence.sequence_id, reason))

    def fail(self, sequence: Sequence, error: str) -> None:
        self._end(sequence)
        self.emit(FailSequence(sequence.sequence_id, error))

    def _end(self, sequence: Sequence) -> None:
        if sequence.state is WAITING:
            self.live.waiting.remove(sequence)
            sequence.state = ENDED
        else:
            self._leave_workers(sequence, ENDED)
        del self.live.sequences[sequence.sequence_id]
