"""The scheduler core: events in, commands out. No clock, no randomness, no I/O.

The rest of the package does the work; this module only says what follows from which event.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from scheduler.batching.steps import StepPlanner
from scheduler.batching.verify_grouping import make_policy
from scheduler.config import SchedulerConfig
from scheduler.messages import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    Command,
    Event,
    FinishReason,
    FinishSequence,
    KvMoved,
    RefusalCause,
    RefuseSequence,
    SequenceCancelled,
    SequenceRequest,
    SequenceSubmitted,
    StepCompleted,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerSpec,
)
from scheduler.speculation.controller import Controller
from scheduler.state.fleet import Fleet
from scheduler.state.invariants import check_integrity
from scheduler.state.live_set import LiveSet
from scheduler.state.pending_kv_moves import KvMoves
from scheduler.state.sequence_record import SequenceState, already_ended
from scheduler.state.workers import DraftWorker, Sequence, TargetWorker
from scheduler.statistics import (
    Counters,
    DraftingSnapshot,
    KeySnapshot,
    MoveStatistics,
    SequenceSnapshot,
    Snapshot,
    WorkerSnapshot,
)
from scheduler.transitions.admission_limits import AdmissionLimits
from scheduler.transitions.blame import blame, blame_on_draft, in_flight
from scheduler.transitions.lifecycle import Lifecycle
from scheduler.transitions.parts import CoreParts
from scheduler.transitions.relocation import Relocation
from scheduler.transitions.results import Rounds


class SchedulerCore:
    """Drives draft and target workers for all live sequences.

    Feed every event to `apply`, and call `plan` after a batch of them and when `next_deadline` says so; carry out the
    commands that both return, in their order. The same calls at the same times give the same commands. No time may be
    before the one of the last call; one that is counts as that one.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._live = LiveSet(config.keys)
        self._admission = AdmissionLimits(config, self._live)
        self._fleet = Fleet(config)
        self._counters = Counters()
        policy = make_policy(config.policy)
        self._controller = Controller(config, self._fleet, self._counters)
        self._commands: list[Command] = []
        parts = CoreParts(
            config,
            self._live,
            self._fleet,
            self._controller,
            KvMoves(config.kv_movement),
            self._counters,
            emit=self._commands.append,
            max_per_target=config.batch_size if policy.lockstep else None,
        )
        self._lifecycle = Lifecycle(parts)
        self._relocation = Relocation(parts, self._lifecycle)
        self._steps = StepPlanner(parts, self._lifecycle, policy)
        self._rounds = Rounds(parts, self._lifecycle)
        self._now = float("-inf")

    def apply(self, event: Event, now: float) -> list[Command]:
        """What follows from the event itself: output, ends, refusals and moves of KV. Its steps follow from `plan`."""
        now = self._begin(now)
        match event:
            case StepCompleted():
                self._complete(event, now)
            case SequenceSubmitted():
                self._submit(event.request, now)
            case SequenceCancelled():
                sequence = self._live.sequences.get(event.sequence_id)
                if sequence is not None:
                    self._lifecycle.finish(sequence, FinishReason.CANCELLED)
            case WorkerJoined():
                self._lose(WorkerLost(event.worker.worker_id, "it came anew"), now)
                self._join(event.worker)
            case WorkerLost():
                self._lose(event, now)
            case WorkerDraining():
                self._relocation.drain(event.worker_id)
            case KvMoved():
                self._relocation.moved(event, now)
        return self._commands.copy()

    def plan(self, now: float) -> list[Command]:
        """All steps that can be sent now. The more events before it, the fuller they are."""
        now = self._begin(now)
        self._steps.send_all(now)
        self._relocation.report_drained()
        return self._commands.copy()

    def handle(self, events: Iterable[Event], now: float) -> list[Command]:
        """A batch of events, then one plan."""
        commands = [command for event in events for command in self.apply(event, now)]
        return commands + self.plan(now)

    def next_deadline(self) -> float | None:
        """When to plan without an event: a worker waits for a larger step and must stop waiting then. None: never."""
        return self._steps.next_deadline()

    @property
    def targets(self) -> int:
        """Target workers that are not about to leave."""
        return self._fleet.accepting

    @property
    def live(self) -> int:
        """Unfinished sequences."""
        return len(self._live.sequences)

    @property
    def waiting(self) -> int:
        """Sequences that nobody works on yet."""
        return len(self._live.waiting)

    def wait_bound(self, target_id: str) -> float:
        """Seconds that a drafted sequence may now wait voluntarily on this target. KeyError for an unknown one."""
        return self._steps.wait_bound(self._fleet.targets[target_id])

    def snapshot(self) -> Snapshot:
        live, counters, targets = self._live, self._counters, self._fleet.targets.values()
        return Snapshot(
            waiting=len(live.waiting),
            running=len(live.running),
            max_running=self._fleet.max_running,
            live=len(live.sequences),
            prefilling=sum(target.count(SequenceState.PREFILLING) for target in targets),
            drafting=sum(target.coming.total for target in targets),
            drafted=sum(target.count(SequenceState.DRAFTED) for target in targets),
            verifying=sum(target.verifying for target in targets),
            moving=sum(sequence.state is SequenceState.MOVING for sequence in live.running.values()),
            acceptance=self._controller.acceptance,
            preemptions=counters.preemptions,
            probes=counters.probes,
            draft_lengths=dict(sorted(counters.draft_lengths.items())),
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
                    worker.worker_id,
                    worker.spec.role,
                    len(worker.sequences),
                    worker.pages.free_pages,
                    worker.spec.total_pages,
                    len(worker.outstanding),
                    *self._controller.law(worker),
                )
                for worker in self._fleet.workers()
            ),
            keys=tuple(
                KeySnapshot(
                    account.key.name,
                    account.running,
                    account.waiting,
                    account.prompt_tokens,
                    account.output_tokens,
                    dict(account.refusals),
                )
                for account in live.accounts
            ),
            drafting_now=tuple(
                DraftingSnapshot(
                    target.worker_id,
                    draft_id,
                    choice.length,
                    choice.gain,
                    choice.rate,
                    tuple(figures.acceptance.chances),
                )
                for target in targets
                for draft_id, choice in self._controller.target(target).choices.items()
                for figures in [self._controller.draft(self._fleet.drafts[draft_id])]
            ),
            outcomes_sought=counters.outcomes_sought,
            outcomes_found=counters.outcomes_found,
        )

    def sequences(self, limit: int) -> list[SequenceSnapshot]:
        """Up to `limit` live sequences: the running ones, then those that wait, each in their order of arrival."""
        live = self._live
        waiting = (sequence for sequence in live.sequences.values() if sequence.sequence_id not in live.running)
        return [
            SequenceSnapshot(
                sequence.sequence_id,
                sequence.length,
                len(sequence.request.prompt),
                sequence.state,
                None if sequence.target is None else sequence.target.worker_id,
            )
            for sequence in islice(chain(live.running.values(), waiting), limit)
        ]

    def has_suspect(self, worker_id: str) -> bool:
        """Whether a sequence will fail if this worker is lost now, unless the loss is blameless."""
        target = self._fleet.targets.get(worker_id)
        return target is not None and any(sequence.suspected for sequence in in_flight(target))

    def check_integrity(self) -> None:
        """Raises RuntimeError when internal records disagree. Visits every live sequence: call it when idle."""
        check_integrity(self._live, self._fleet)

    def _begin(self, now: float) -> float:
        self._now = max(now, self._now)
        self._commands.clear()
        return self._now

    # --- events -------------------------------------------------------------------------------------------------------

    def _submit(self, request: SequenceRequest, now: float) -> None:
        emit = self._commands.append
        invalid = self._find_fault(request)
        if invalid is not None:
            emit(RefuseSequence(request.sequence_id, RefusalCause.INVALID, invalid))
            return
        ended = already_ended(request)
        if ended is not None:
            emit(FinishSequence(request.sequence_id, ended))
            return
        sequence = Sequence(request, self._live.next_order(), self._live.accounts.of(request.key))
        if self._fleet.targets and not self._lifecycle.fits_somewhere(sequence):
            message = self._lifecycle.too_long(sequence)
            emit(RefuseSequence(request.sequence_id, RefusalCause.TOO_LONG, message))
            return
        refusal = self._admission.refusal(sequence, now)
        if refusal is not None and self._lifecycle.admit():
            # Sequences that came since the last plan may have left the queue now.
            refusal = self._admission.refusal(sequence, now)
        if refusal is not None:
            sequence.account.refusals[refusal.limit] += 1
            emit(RefuseSequence(request.sequence_id, refusal.cause, refusal.message, refusal.retry_after_seconds))
            return
        self._admission.debit(sequence, now)
        self._lifecycle.submit(sequence)

    def _find_fault(self, request: SequenceRequest) -> str | None:
        if request.sequence_id in self._live.sequences:
            return f"sequence_id {request.sequence_id} is taken by a live sequence"
        if not request.prompt:
            return "prompt is empty, must have at least 1 token"
        if request.max_tokens < 1:
            return f"max_tokens is {request.max_tokens}, must be at least 1"
        if request.draft_length is not None and request.draft_length < 0:
            return f"draft_length is {request.draft_length}, must be None or at least 0"
        if not MIN_PRIORITY <= request.priority <= MAX_PRIORITY:
            return f"priority is {request.priority}, must be between {MIN_PRIORITY} and {MAX_PRIORITY}"
        return None

    def _complete(self, event: StepCompleted, now: float) -> None:
        results = {result.sequence_id: result for result in event.results}
        worker = self._fleet.find(event.worker_id)
        if isinstance(worker, TargetWorker):
            self._rounds.target_step(worker, event.step_id, results, event.seconds, now)
        elif isinstance(worker, DraftWorker):
            self._rounds.draft_step(worker, event.step_id, results, event.seconds, now)

    def _join(self, spec: WorkerSpec) -> None:
        self._fleet.add(spec)
        if len(self._fleet.targets) == 1:
            for sequence in self._live.waiting.members():
                if not self._lifecycle.fits_somewhere(sequence):
                    self._lifecycle.fail(sequence, self._lifecycle.too_long(sequence))

    def _lose(self, event: WorkerLost, now: float) -> None:
        """Forgets everything in flight there. The worker's sequences go elsewhere, with the tokens that they have."""
        worker = self._fleet.remove(event.worker_id)
        self._controller.lose(event.worker_id)
        if isinstance(worker, TargetWorker):
            suspects = [] if event.blameless or worker.draining else in_flight(worker)
            self._relocation.lose(worker, now)
            blame(suspects, worker.worker_id, event.reason, self._lifecycle, self._commands.append)
        elif isinstance(worker, DraftWorker):
            if not event.blameless:
                blame_on_draft(worker)
            for sequence in list(worker.sequences.values()):
                self._lifecycle.leave_draft(sequence)
                if sequence.state in (SequenceState.READY, SequenceState.DRAFTING):
                    self._lifecycle.begin_round(sequence, now)
