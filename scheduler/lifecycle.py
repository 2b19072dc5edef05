"""How sequences move between states and between workers. Every change of state passes here."""

from __future__ import annotations

from scheduler.config import SchedulerConfig
from scheduler.draft_lengths import DraftLengths
from scheduler.fleet import Fleet
from scheduler.kv_moves import KvMove, KvMoves
from scheduler.messages import Command, FailSequence, FinishReason, FinishSequence
from scheduler.policies import GroupingPolicy
from scheduler.pool import Pool
from scheduler.sequence import Sequence, SequenceState
from scheduler.statistics import Counters
from scheduler.worker_book import DraftBook, TargetBook

# Looked up for every row: names are faster than attributes of the enumeration.
WAITING, PREFILLING = SequenceState.WAITING, SequenceState.PREFILLING
READY, DRAFTING = SequenceState.READY, SequenceState.DRAFTING
DRAFTED, VERIFYING = SequenceState.DRAFTED, SequenceState.VERIFYING
MOVING = SequenceState.MOVING


class Lifecycle:
    """Moves sequences, and writes down in `commands` what the outside must know of it."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: Pool,
        fleet: Fleet,
        policy: GroupingPolicy,
        lengths: DraftLengths,
        moves: KvMoves,
        counters: Counters,
    ) -> None:
        self._config = config
        self._pool = pool
        self._fleet = fleet
        self._most_per_target = config.batch_size if policy.lockstep else None
        self._lengths = lengths
        self._moves = moves
        self._counters = counters
        self.commands: list[Command] = []

    # --- rounds -------------------------------------------------------------------------------------------------------

    def move(self, sequence: Sequence, state: SequenceState) -> None:
        """Changes the state, and with it the sequence's place in the books of its workers."""
        self._leave_state(sequence)
        self._enter_state(sequence, state)

    def _enter_state(self, sequence: Sequence, state: SequenceState) -> None:
        sequence.state = state
        target, draft = sequence.target, sequence.draft
        if target is None:
            return
        if state is DRAFTED:
            target.drafted.add(sequence)
        elif state is VERIFYING:
            target.verifying += 1
            if draft is not None:
                draft.verifying += 1
        elif state is READY or state is DRAFTING:
            target.coming.add(sequence.length)
            if state is READY and draft is not None:
                draft.ready[sequence.sequence_id] = sequence
        elif state is PREFILLING:
            target.prefilling[sequence.sequence_id] = sequence

    def _leave_state(self, sequence: Sequence) -> None:
        """Takes the sequence out of the indexes. Only now may its homes change; WAITING stands for no index."""
        state, target, draft = sequence.state, sequence.target, sequence.draft
        if state is WAITING or target is None:
            return
        sequence.state = WAITING
        if state is DRAFTED:
            target.drafted.remove(sequence)
        elif state is VERIFYING:
            target.verifying -= 1
            if draft is not None:
                draft.verifying -= 1
        elif state is READY or state is DRAFTING:
            target.coming.remove(sequence.length)
            if state is READY and draft is not None:
                del draft.ready[sequence.sequence_id]
        elif state is PREFILLING:
            del target.prefilling[sequence.sequence_id]

    def begin_round(self, sequence: Sequence, now: float) -> None:
        """Sends a sequence whose target is up to date to its draft worker, or straight to the target.

        One whose target drains goes to another first, where there is room.
        """
        if sequence.target is not None and sequence.target.draining and self.leave_target(sequence):
            return
        self._leave_state(sequence)
        if sequence.draft is not None and sequence.length >= sequence.draft.spec.max_sequence_length:
            self.leave_draft(sequence)
        wished = self.longest_draft(sequence)
        if wished and sequence.request.draft_length is None:
            wished = self._lengths.for_round(sequence, wished)
        if wished and sequence.draft is None:
            self._find_draft(sequence)
            wished = min(wished, self.longest_draft(sequence))
        sequence.wished_length = wished
        draft = sequence.draft
        if draft is None:
            self.skip_draft(sequence, now)
            return
        lack = draft.note_lack(sequence)
        if not wished:
            self.skip_draft(sequence, now)
            return
        flight = draft.in_flight.get(sequence.sequence_id)
        fed = 0 if flight is None or flight.abandoned else len(flight.row.tokens)
        # A draft that is far behind catches up beside plain rounds instead of holding the sequence up; not where it
        # holds up all of them either way.
        far_behind = lack > self._lengths.eager_lack and not draft.turns
        if lack - fed <= draft.most_lack and not far_behind:
            sequence.ready_at = now
            self._enter_state(sequence, READY)
        else:
            self.skip_draft(sequence, now)

    def start_drafting(self, sequence: Sequence, draft: DraftBook) -> None:
        """From READY, where it is counted as on its way to DRAFTED already."""
        del draft.ready[sequence.sequence_id]
        sequence.state = DRAFTING

    def start_verifying(self, sequence: Sequence, target: TargetBook) -> None:
        """From DRAFTED."""
        target.drafted.remove(sequence)
        target.verifying += 1
        if sequence.draft is not None:
            sequence.draft.verifying += 1
        sequence.state = VERIFYING

    def skip_draft(self, sequence: Sequence, now: float) -> None:
        """A plain decoding round."""
        self.become_drafted(sequence, (), 0, now)

    def become_drafted(
        self, sequence: Sequence, draft_tokens: tuple[int, ...], asked: int, now: float, confidences: bytes = b""
    ) -> None:
        """`asked` counts the tokens asked of the draft, `confidences` are its in what came; it may know none."""
        if len(confidences) != len(draft_tokens):
            confidences = b""
        if confidences:
            chances = self._lengths.promising(sequence, confidences)
            draft_tokens = draft_tokens[: len(chances)]
            sequence.expected_tokens = 1.0 + sum(chances)
        else:
            sequence.expected_tokens = self._lengths.expected_tokens(sequence, len(draft_tokens))
        sequence.draft_tokens = draft_tokens
        sequence.confidences = confidences
        sequence.asked_length = asked
        sequence.drafted_at = now
        target = sequence.target
        if target is not None:
            sequence.due = target.due(now, self._config.wait_bound_steps)
        if target is not None and sequence.state is DRAFTING:
            # What `move` would do, in fewer calls: every proposal passes here.
            target.coming.remove(sequence.length)
            sequence.state = DRAFTED
            target.drafted.add(sequence)
        else:
            self.move(sequence, DRAFTED)

    def catch_up(self, sequence: Sequence) -> None:
        """Back to feeding the target committed tokens; a proposal that was pending is dropped."""
        sequence.draft_tokens = ()
        if sequence.draft is not None:
            sequence.draft.note_lack(sequence)
        self.move(sequence, PREFILLING)

    def plan_changed(self, target: TargetBook) -> None:
        """Newcomers that will not draft any more need no draft KV."""
        for sequence in target.prefilling.values():
            if sequence.wished_length and sequence.request.draft_length is None:
                sequence.wished_length = self._lengths.for_newcomer(target, sequence.wished_length)
                if sequence.draft is not None:
                    sequence.draft.note_lack(sequence)

    def longest_draft(self, sequence: Sequence) -> int:
        """Tokens that may be proposed in the sequence's next round, if its draft worker can."""
        if sequence.drafting_refused:
            return 0
        asked, target, draft = sequence.request.draft_length, sequence.target, sequence.draft
        length = self._config.draft_length if asked is None else asked
        if length >= (rest := sequence.end - sequence.length):
            length = rest - 1
        if target is not None and length > target.longest_draft:
            length = target.longest_draft
        if draft is not None and length > (rest := draft.spec.max_sequence_length - sequence.length):
            length = max(0, rest)
        return length

    # --- homes --------------------------------------------------------------------------------------------------------

    def admit(self) -> bool:
        """Fills the window from the queue, first come first served; whether anyone came in."""
        pool, admitted = self._pool, False
        while len(pool.window) < self._config.window:
            sequence = pool.queue.oldest()
            if sequence is None or not self._fleet.targets:
                break
            if not self.fits_somewhere(sequence):
                self.fail(sequence, self.too_long(sequence))
                continue
            longest = self.longest_draft(sequence)
            positions = sequence.length + longest + 1
            target = self._fleet.choose_target(positions, self._most_per_target)
            if target is None:
                break
            pool.queue.remove(sequence)
            pool.window[sequence.sequence_id] = sequence
            target.house(sequence, positions)
            sequence.target = target
            asked = sequence.request.draft_length is not None
            sequence.wished_length = longest if asked else self._lengths.for_newcomer(target, longest)
            if sequence.wished_length:
                self._find_draft(sequence)
            self.move(sequence, PREFILLING)
            admitted = True
        return admitted

    def fits_somewhere(self, sequence: Sequence) -> bool:
        request = sequence.request
        return len(request.prompt) + request.max_tokens <= self._fleet.largest_capacity()

    def too_long(self, sequence: Sequence) -> str:
        request = sequence.request
        prompt, most = len(request.prompt), request.max_tokens
        limit = self._fleet.largest_capacity()
        return f"prompt of {prompt} and max_tokens of {most} need {prompt + most} positions, the limit is {limit}"

    def _find_draft(self, sequence: Sequence) -> None:
        """Finds a draft home, if there is room. READY and VERIFYING are indexed by it: not in those states."""
        positions = sequence.length + self.longest_draft(sequence)
        draft = self._fleet.choose_draft(positions)
        if draft is not None:
            draft.house(sequence, positions)
            sequence.draft = draft

    def leave_draft(self, sequence: Sequence) -> None:
        """Gives up the draft home; a sequence that was READY or DRAFTING must begin its round again."""
        draft = sequence.draft
        if draft is None:
            return
        if sequence.state is READY:
            del draft.ready[sequence.sequence_id]
        elif sequence.state is VERIFYING:
            draft.verifying -= 1
        draft.evict(sequence)
        sequence.draft = None

    def leave_target(self, sequence: Sequence) -> bool:
        """Finds the sequence another target, with its KV or without, whichever is sooner; False where it stays.

        No row of it may be in flight on the one it has.
        """
        source = sequence.target
        positions = sequence.length + self.longest_draft(sequence) + 1
        destination = self._fleet.choose_target(positions, self._most_per_target)
        if source is None or destination is None:
            return False
        if not self._moves.worth_it(source.kv[sequence.sequence_id].valid, destination):
            self._rehome(sequence, source, destination, positions)
        elif self._moves.may_leave(source):
            self._move_kv(sequence, source, destination, positions)
        else:
            return False
        return True

    def _rehome(self, sequence: Sequence, source: TargetBook, destination: TargetBook, positions: int) -> None:
        """Moves without KV."""
        self._counters.rehomed += 1
        self._leave_state(sequence)
        source.evict(sequence)
        destination.house(sequence, positions)
        sequence.target = destination
        self.catch_up(sequence)

    def _move_kv(self, sequence: Sequence, source: TargetBook, destination: TargetBook, positions: int) -> None:
        self._leave_state(sequence)
        if sequence.draft is not None:
            sequence.draft.note_lack(sequence)
        destination.house(sequence, positions)
        # Whatever becomes of the move, the destination may hold something to release from now on.
        destination.kv[sequence.sequence_id].opened = True
        self.commands.append(self._moves.begin(sequence, source, destination))
        self._enter_state(sequence, MOVING)

    def arrive(self, move: KvMove, now: float) -> None:
        """The KV of a MOVING sequence is where it was to go."""
        sequence = move.sequence
        self._change_target(sequence, move.source, move.destination)
        move.destination.kv[sequence.sequence_id].valid = move.positions
        if move.positions < sequence.length - 1:
            self.catch_up(sequence)
        else:
            self.begin_round(sequence, now)

    def arrive_without_kv(self, move: KvMove) -> None:
        """The KV of a MOVING sequence did not get through: it is computed anew where it was to go."""
        sequence, destination = move.sequence, move.destination
        self._change_target(sequence, move.source, destination)
        destination.kv[sequence.sequence_id].opened = False
        destination.releases[sequence.sequence_id] = None
        self.catch_up(sequence)

    def _change_target(self, sequence: Sequence, source: TargetBook, destination: TargetBook) -> None:
        self._leave_state(sequence)
        source.evict(sequence)
        sequence.kv_move = None
        sequence.target = destination

    def stay(self, sequence: Sequence, now: float) -> None:
        """The target that a MOVING sequence was to go to is gone."""
        self._leave_state(sequence)
        self._moves.abandon(sequence)
        self.begin_round(sequence, now)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence out of the window to give its pages to others."""
        self._counters.preemptions += 1
        self.return_to_queue(sequence)

    def return_to_queue(self, sequence: Sequence) -> None:
        """Takes a sequence out of the window, to its old place in the queue, with the tokens it has."""
        self._leave_window(sequence)
        self._pool.queue.push(sequence)

    def _leave_window(self, sequence: Sequence) -> None:
        self._leave_state(sequence)
        self.leave_draft(sequence)
        move = sequence.kv_move
        if move is not None:
            move.destination.evict(sequence)
            self._moves.abandon(sequence)
        if sequence.target is not None:
            sequence.target.evict(sequence)
            sequence.target = None
        sequence.draft_tokens = ()
        del self._pool.window[sequence.sequence_id]

    # --- ends ---------------------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._lengths.finished(sequence)
        cancelled = reason is FinishReason.CANCELLED
        self._end(sequence, SequenceState.CANCELLED if cancelled else SequenceState.FINISHED)
        self.commands.append(FinishSequence(sequence.sequence_id, reason))

    def fail(self, sequence: Sequence, error: str) -> None:
        self._end(sequence, SequenceState.FAILED)
        self.commands.append(FailSequence(sequence.sequence_id, error))

    def _end(self, sequence: Sequence, state: SequenceState) -> None:
        if sequence.state is WAITING:
            self._pool.queue.remove(sequence)
        else:
            self._leave_window(sequence)
        sequence.state = state
        del self._pool.sequences[sequence.sequence_id]
