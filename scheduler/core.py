"""The scheduler core: events in, commands out. No clock, no randomness, no I/O.

The rest of the package does the work; this module only says what follows from which event.
"""

from __future__ import annotations

from itertools import chain, islice

from scheduler.config import SchedulerConfig
from scheduler.draft_lengths import make_draft_lengths
from scheduler.draft_steps import DraftPlanner
from scheduler.fleet import Fleet
from scheduler.integrity import check_integrity
from scheduler.kv_moves import KvMoves
from scheduler.lifecycle import Lifecycle
from scheduler.messages import (
    Command,
    Event,
    FinishReason,
    FinishSequence,
    KvMoved,
    RefusalCause,
    RefuseSequence,
    SendStep,
    SequenceCancelled,
    SequenceRequest,
    SequenceSubmitted,
    StepCompleted,
    Tick,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerSpec,
)
from scheduler.policies import make_policy
from scheduler.pool import Pool
from scheduler.relocation import Relocation
from scheduler.rounds import Rounds
from scheduler.sequence import Sequence, SequenceState, already_ended
from scheduler.statistics import (
    Counters,
    GroupStatistics,
    MoveStatistics,
    SequenceSnapshot,
    Snapshot,
    WorkerSnapshot,
)
from scheduler.step_times import Acceptance
from scheduler.target_steps import TargetPlanner
from scheduler.worker_book import DraftBook, TargetBook


class SchedulerCore:
    """Drives draft and target workers over a pool of sequences.

    Feed every event to `handle` and carry out the commands it returns, in their order; send a `Tick` when
    `next_deadline` says so. The same events at the same times give the same commands.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._pool = Pool()
        self._fleet = Fleet(config)
        self._counters = Counters()
        self._acceptance = Acceptance()
        policy = make_policy(config.policy)
        lengths = make_draft_lengths(config, self._fleet, self._acceptance, self._counters)
        moves = KvMoves(config.kv_movement)
        self._lifecycle = Lifecycle(config, self._pool, self._fleet, policy, lengths, moves, self._counters)
        self._relocation = Relocation(self._fleet, self._lifecycle, moves, self._counters)
        self._drafts = DraftPlanner(config, self._fleet, self._lifecycle)
        self._targets = TargetPlanner(config, self._fleet, self._lifecycle, lengths, policy)
        self._rounds = Rounds(self._lifecycle, lengths, self._counters)
        self._last_step_id = 0
        self._now = float("-inf")

    def handle(self, event: Event, now: float) -> list[Command]:
        """What to do about `event` at time `now`. A time before the last one counts as the last one."""
        self._now = now = max(now, self._now)
        commands = self._lifecycle.commands = []
        match event:
            case StepCompleted():
                self._complete(event, now)
            case SequenceSubmitted():
                self._submit(event.request)
            case SequenceCancelled():
                sequence = self._pool.sequences.get(event.sequence_id)
                if sequence is not None:
                    self._lifecycle.finish(sequence, FinishReason.CANCELLED)
            case WorkerJoined():
                self._lose(event.worker.worker_id, now)
                self._join(event.worker)
            case WorkerLost():
                self._lose(event.worker_id, now)
            case WorkerDraining():
                self._relocation.drain(event.worker_id)
            case KvMoved():
                self._relocation.moved(event, now)
            case Tick():
                pass
        self._send_steps(now)
        return commands

    def next_deadline(self) -> float | None:
        """When a `Tick` is due: a worker waits for a larger step and must stop waiting then. None: never."""
        deadlines = [self._targets.deadline(target) for target in self._fleet.targets.values()]
        deadlines += [self._drafts.deadline(draft) for draft in self._fleet.drafts.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def wait_bound(self, target_id: str) -> float:
        """Seconds that a drafted sequence may now wait voluntarily on this target. KeyError for an unknown one."""
        return self._targets.bound(self._fleet.targets[target_id])

    def snapshot(self) -> Snapshot:
        pool, counters, targets = self._pool, self._counters, self._fleet.targets.values()
        return Snapshot(
            waiting=len(pool.queue),
            window=len(pool.window),
            pool=len(pool.sequences),
            prefilling=sum(len(target.prefilling) for target in targets),
            drafting=sum(target.coming.total for target in targets),
            drafted=sum(len(target.drafted) for target in targets),
            verifying=sum(target.verifying for target in targets),
            moving=sum(sequence.state is SequenceState.MOVING for sequence in pool.window.values()),
            acceptance=self._acceptance.rate,
            rounds=counters.rounds,
            emitted_tokens=counters.emitted_tokens,
            drafted_tokens=counters.drafted_tokens,
            accepted_tokens=counters.accepted_tokens,
            preemptions=counters.preemptions,
            steps=counters.steps,
            probes=counters.probes,
            draft_lengths=dict(sorted(counters.draft_lengths.items())),
            groups=GroupStatistics(
                counters.groups,
                counters.grouped_rows,
                counters.equal_groups,
                counters.equal_rows,
                counters.forced_groups,
            ),
            moves=MoveStatistics(
                counters.moves,
                counters.moved_positions,
                counters.moved_bytes,
                counters.move_seconds,
                counters.failed_moves,
                counters.rehomed,
            ),
            workers=tuple(
                WorkerSnapshot(
                    book.worker_id,
                    book.spec.role,
                    len(book.sequences),
                    book.pages.free_pages,
                    book.spec.total_pages,
                    len(book.outstanding),
                    book.times.base,
                    book.times.per_row,
                )
                for book in self._fleet.books()
            ),
        )

    def sequences(self, most: int) -> list[SequenceSnapshot]:
        """Up to `most` live sequences: those in the window, then those that wait, first come first."""
        pool = self._pool
        waiting = (sequence for sequence in pool.sequences.values() if sequence.sequence_id not in pool.window)
        return [
            SequenceSnapshot(
                sequence.sequence_id,
                sequence.length,
                len(sequence.request.prompt),
                sequence.state,
                None if sequence.target is None else sequence.target.worker_id,
            )
            for sequence in islice(chain(pool.window.values(), waiting), most)
        ]

    def check_integrity(self) -> None:
        """Raises RuntimeError when internal books disagree. Touches the whole window: call it when idle."""
        check_integrity(self._pool, self._fleet)

    # --- events -------------------------------------------------------------------------------------------------------

    def _submit(self, request: SequenceRequest) -> None:
        commands = self._lifecycle.commands
        invalid = self._find_fault(request)
        if invalid is not None:
            commands.append(RefuseSequence(request.sequence_id, RefusalCause.INVALID, invalid))
            return
        ended = already_ended(request)
        if ended is not None:
            commands.append(FinishSequence(request.sequence_id, ended))
            return
        sequence = Sequence(request, self._pool.next_order())
        if self._fleet.targets and not self._lifecycle.fits_somewhere(sequence):
            message = self._lifecycle.too_long(sequence)
            commands.append(RefuseSequence(request.sequence_id, RefusalCause.TOO_LONG, message))
            return
        full = self._queue_full(sequence)
        if full is not None:
            commands.append(RefuseSequence(request.sequence_id, RefusalCause.QUEUE_FULL, full))
            return
        self._pool.sequences[sequence.sequence_id] = sequence
        self._pool.queue.push(sequence)

    def _find_fault(self, request: SequenceRequest) -> str | None:
        if request.sequence_id in self._pool.sequences:
            return f"sequence_id {request.sequence_id} is taken by a live sequence"
        if not request.prompt:
            return "prompt is empty, must have at least 1 token"
        if request.max_tokens < 1:
            return f"max_tokens is {request.max_tokens}, must be at least 1"
        if request.draft_length is not None and request.draft_length < 0:
            return f"draft_length is {request.draft_length}, must be None or at least 0"
        return None

    def _queue_full(self, sequence: Sequence) -> str | None:
        """A sequence that was admitted before, or had output, is let in again whatever the queue holds."""
        queue, config = self._pool.queue, self._config
        if sequence.request.admitted_before or sequence.request.committed_output:
            return None
        if len(queue) >= config.max_queued_sequences:
            return f"{len(queue)} sequences wait, the limit is {config.max_queued_sequences}"
        most_tokens = config.max_queued_tokens
        if most_tokens is not None and len(queue) and queue.tokens + sequence.length > most_tokens:
            return f"{queue.tokens} tokens wait, {sequence.length} more would pass the limit of {most_tokens}"
        return None

    def _complete(self, event: StepCompleted, now: float) -> None:
        results = {result.sequence_id: result for result in event.results}
        book = self._fleet.find(event.worker_id)
        if isinstance(book, TargetBook):
            self._rounds.target_step(book, event.step_id, results, event.seconds, now)
        elif isinstance(book, DraftBook):
            self._rounds.draft_step(book, event.step_id, results, event.seconds, now)

    def _join(self, spec: WorkerSpec) -> None:
        self._fleet.add(spec)
        if len(self._fleet.targets) == 1:
            for sequence in self._pool.queue.members():
                if not self._lifecycle.fits_somewhere(sequence):
                    self._lifecycle.fail(sequence, self._lifecycle.too_long(sequence))

    def _lose(self, worker_id: str, now: float) -> None:
        """Everything in flight there is forgotten; its sequences go elsewhere with the tokens they have."""
        book = self._fleet.remove(worker_id)
        if isinstance(book, TargetBook):
            self._relocation.lose(book, now)
        elif isinstance(book, DraftBook):
            for sequence in list(book.sequences.values()):
                self._lifecycle.leave_draft(sequence)
                if sequence.state in (SequenceState.READY, SequenceState.DRAFTING):
                    self._lifecycle.begin_round(sequence, now)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _send_steps(self, now: float) -> None:
        """Draft workers first: what they take on decides for what a target may wait."""
        progress = True
        while progress:
            preemptions = self._counters.preemptions
            progress = self._lifecycle.admit()
            for draft in self._fleet.drafts.values():
                progress |= self._send(self._drafts.plan(draft, self._last_step_id + 1, now))
            for target in self._fleet.targets.values():
                progress |= self._send(self._targets.plan(target, self._last_step_id + 1, now))
            # Pages that came free without a step may let somebody in.
            progress |= self._counters.preemptions > preemptions
        for book in self._fleet.books():
            if book.releases and not book.outstanding:
                self._send(book.release(self._last_step_id + 1, now))
        self._lifecycle.commands.extend(self._relocation.drained())

    def _send(self, step: SendStep | None) -> bool:
        if step is None:
            return False
        self._last_step_id = step.step_id
        self._counters.count_step(step.group)
        self._lifecycle.commands.append(step)
        return True
