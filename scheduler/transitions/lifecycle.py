"""How sequences move between states and between workers."""

from __future__ import annotations

from collections.abc import Collection

from spool.scheduler.config import KvMovement, SchedulerConfig
from spool.scheduler.messages import (
    Command,
    FailSequence,
    FinishReason,
    FinishSequence,
    KvMoved,
    MoveKv,
    Row,
    SequenceState,
)
from spool.scheduler.speculation.controller import Controller
from spool.scheduler.state.fleet import Fleet
from spool.scheduler.state.live_set import LiveSet
from spool.scheduler.state.workers import (
    ENDED,
    IDLE,
    MOVING,
    PREFILLING,
    VERIFYING,
    WAITING,
    KvMove,
    Sequence,
    TargetWorker,
    change_state,
)
from spool.scheduler.statistics import Counters
from spool.scheduler.transitions.assignment import Assignment
from spool.scheduler.transitions.fair_preemption import Preemption, find_preemption

MAX_MOVES_PER_TARGET = 4
"""Sequences whose KV leaves a draining target at the same time; its other sequences go on decoding there."""


class Lifecycle:
    """Moves sequences, and emits the commands that follow: ends, failures and moves of KV."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.live = LiveSet(config.keys)
        self.fleet = Fleet(config)
        self.assignment = Assignment(self.fleet)
        self.counters = Counters()
        self.controller = Controller(config, self.counters)
        self.commands: list[Command] = []
        self.emit = self.commands.append
        self._moves: dict[int, KvMove] = {}
        """Those that were not answered yet."""
        self._last_move_id = 0
        self.preemption: Preemption | None = None
        """For the sequence that waits first, while rows of its victims are in flight: they get no others."""

    # --- rounds -------------------------------------------------------------------------------------------------------

    def begin_round(self, sequence: Sequence, before: Row | None = None) -> None:
        """The target is up to date: the sequence waits for a verify group, to verify what the row `before` asked for. A
        sequence whose target drains moves to another target first, if one that gives the same bits has room."""
        target = sequence.target
        if target is None or (target.draining and self.relocate(sequence)):
            return
        sequence.verify, sequence.drafted, sequence.looked_up = 0, 0, False
        if before is not None:
            asks, longest = before.asks, self.controller.longest(sequence)
            sequence.verify = asks if asks < longest else longest
            sequence.drafted, sequence.looked_up = before.draft_length, before.lookup_length != 0
        sequence.due = target.due()
        change_state(sequence, IDLE)

    def go_on(self, sequence: Sequence, row: Row) -> None:
        """The row of the next round is with the target already, and follows."""
        row.kv_len, row.end = sequence.length - 1, sequence.length
        row.prefix_digest = sequence.tokens.digests[row.kv_len]
        if sequence.state is not VERIFYING:
            change_state(sequence, VERIFYING)

    # --- places -------------------------------------------------------------------------------------------------------

    def admit(self) -> bool:
        """Lets waiting sequences run, in the order of the waiting queue. Returns whether any was let in.

        Where targets are not alike, one that waits for targets with its fingerprint is passed over: they take in no
        other before it, and targets with other fingerprints do.
        """
        live, admitted, before = self.live, False, self.preemption
        self.preemption = None
        passed_over: set[Sequence] = set()
        while live.waiting and (sequence := live.waiting.first(passed_over)) is not None:
            if self.fleet.accepting and (misfit := self.misfit(sequence)) is not None:
                self.fail(sequence, misfit)
                continue
            positions = self._next_positions(sequence)
            target = self._take_place(sequence, positions, {one.fingerprint for one in passed_over})
            if target is None:
                if not self.fleet.waits_for_its_own(sequence):
                    break
                passed_over.add(sequence)
                continue
            live.start(sequence)
            target.place(sequence, positions)
            sequence.target = target
            change_state(sequence, PREFILLING)
            admitted = True
        if before is not None:
            before.target.changed = True
        return admitted

    def _take_place(self, sequence: Sequence, positions: int, kept_for_others: Collection[str]) -> TargetWorker | None:
        """The target for a waiting sequence; others of a key that runs more may be preempted for it. None: it waits.
        `kept_for_others` as in `Fleet.pick_target`."""
        fleet, target = self.fleet, None
        if len(self.live.running) - fleet.ending < fleet.max_running or fleet.must_end(sequence):
            target = fleet.pick_target(sequence, positions, kept_for_others)
        if target is None:
            preemption = find_preemption(sequence, positions, self.live, fleet, kept_for_others)
            if preemption is not None and preemption.busy:
                self.preemption = preemption
            elif preemption is not None:
                for other in preemption.victims:
                    self.preempt(other)
                target = fleet.pick_target(sequence, positions, kept_for_others)
        return target

    def _next_positions(self, sequence: Sequence) -> int:
        """Positions with which a target takes the sequence in: those of its next two rows. The last token that it may
        get has none."""
        return min(sequence.length + self.controller.longest(sequence) + 1, sequence.end - 1)

    def misfit(self, sequence: Sequence) -> str | None:
        """Why no target can hold the sequence; None where one can."""
        need, limit = sequence.end - 1, self.fleet.largest_capacity
        if need <= limit:
            return None
        prompt, most = len(sequence.request.prompt), sequence.request.max_tokens
        return f"prompt of {prompt} and max_tokens of {most} need {need} positions, the limit is {limit}"

    def relocate(self, sequence: Sequence) -> bool:
        """Moves the sequence from a draining target to another one, with its KV where that is faster. False: it stays.

        No row of the sequence may be in flight on its target.
        """
        source = sequence.target
        if source is None or not source.draining:
            return False
        positions = self._next_positions(sequence)
        destination = self.fleet.pick_target(sequence, positions)
        if destination is None or destination.draining:
            return False
        valid = source.kv[sequence.sequence_id].valid
        if source.spec.fingerprint != destination.spec.fingerprint:
            valid = 0  # nothing is known of the sequence but its prompt, which the destination computes itself
        moving, computing = self.controller.relocation_seconds(source, destination, valid)
        movement = self.config.kv_movement
        faster = moving < computing if movement is KvMovement.AUTO else movement is KvMovement.ALWAYS
        if not (valid > 0 and faster):
            self.counters.moves.rehomed += 1
            destination.place(sequence, positions)
            self._change_target(sequence, source, destination)
            change_state(sequence, PREFILLING)
            return True
        if sum(move.source is source and not move.abandoned for move in self._moves.values()) >= MAX_MOVES_PER_TARGET:
            return False
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

    def moved(self, event: KvMoved) -> None:
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
            change_state(sequence, PREFILLING)
        else:
            self.begin_round(sequence)

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

    def drain(self, target: TargetWorker) -> None:
        """Sequences leave the target between two rounds, when no row of them is in flight. Until then, and while no
        other target that gives the same bits has room, they go on where they are."""
        self.fleet.drain(target)
        for sequence in list(target.sequences.values()):
            untouched = not target.kv[sequence.sequence_id].valid and sequence.sequence_id not in target.in_flight
            if sequence.state is PREFILLING and untouched:
                self.relocate(sequence)

    def lose_target(self, target: TargetWorker) -> None:
        """The target is gone: its sequences return to the queue with their tokens, and moves to it end."""
        for sequence in list(target.sequences.values()):
            if sequence.target is target:
                self.return_to_queue(sequence)
            else:
                self._abandon_move(sequence)
                self.begin_round(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes the pages of a running sequence for others."""
        self.counters.preemptions += 1
        self.return_to_queue(sequence)

    def return_to_queue(self, sequence: Sequence) -> None:
        """Takes a sequence off its target. It keeps its tokens, and gets its old place in the queue back."""
        self._unplace(sequence, WAITING)
        self.live.waiting.push(sequence)

    def _unplace(self, sequence: Sequence, state: SequenceState) -> None:
        """The sequence runs no more, so it has no target and no pages."""
        move, target = sequence.kv_move, sequence.target
        if move is not None:
            move.destination.evict(sequence)
            self._abandon_move(sequence)
        if target is not None:
            target.index(sequence, sequence.state, -1)
            target.evict(sequence)
        sequence.target, sequence.state = None, state
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
            self._unplace(sequence, ENDED)
        del self.live.sequences[sequence.sequence_id]
