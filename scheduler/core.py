"""The scheduler core: events in, commands out. No clock, no randomness, no I/O.

The rest of the package does the work; this module only says what follows from which event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import fields, replace
from itertools import chain, islice

from spool.scheduler.batching.verify_steps import TargetPlanner
from spool.scheduler.config import SchedulerConfig
from spool.scheduler.messages import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    PROPOSERS,
    Command,
    Event,
    FinishReason,
    FinishSequence,
    KvMoved,
    RefusalCause,
    RefuseSequence,
    Role,
    SendStep,
    SequenceCancelled,
    SequenceRequest,
    SequenceState,
    SequenceSubmitted,
    StepCompleted,
    WorkerDrained,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerSpec,
    WorkersSettled,
)
from spool.scheduler.state.worker_records import Work
from spool.scheduler.state.workers import DraftWorker, Sequence, TargetWorker, already_ended
from spool.scheduler.statistics import (
    Counters,
    DraftingSnapshot,
    KeySnapshot,
    SequenceSnapshot,
    Snapshot,
    WorkerSnapshot,
)
from spool.scheduler.transitions.admission_limits import find_limit, is_known
from spool.scheduler.transitions.blame import blame, in_flight
from spool.scheduler.transitions.lifecycle import Lifecycle
from spool.scheduler.transitions.results import Rounds


class SchedulerCore:
    """Drives target workers for all live sequences, and tells each which draft worker serves it.

    Feed every event to `apply`, call `plan` after a batch of them, and carry out the commands of both in their order.
    The same calls at the same times give the same commands. Time does not go back: an earlier one counts as the last.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._lifecycle = lifecycle = Lifecycle(config)
        self._live, self._fleet, self._commands = lifecycle.live, lifecycle.fleet, lifecycle.commands
        self._counters = lifecycle.counters
        self._config = config
        self._assignment = lifecycle.assignment
        self._planner = TargetPlanner(lifecycle)
        self._rounds = Rounds(lifecycle)
        self._last_step_id = 0
        self._now = float("-inf")

    def apply(self, event: Event, now: float) -> list[Command]:
        """What follows from the event itself: output, ends, refusals and moves of KV. Its steps follow from `plan`."""
        now = self._now = max(now, self._now)
        self._commands.clear()
        match event:
            case StepCompleted():
                target = self._fleet.targets.get(event.worker_id)
                if target is not None:
                    self._rounds.apply(target, event, now)
            case SequenceSubmitted():
                self._submit(event.request, now)
            case SequenceCancelled():
                sequence = self._live.sequences.get(event.sequence_id)
                if sequence is not None:
                    self._lifecycle.finish(sequence, FinishReason.CANCELLED)
            case WorkerJoined():
                self._lose(WorkerLost(event.worker.worker_id, "it started again"), now)
                self._join(event.worker, now)
            case WorkerLost():
                self._lose(event, now)
            case WorkerDraining():
                self._drain(event.worker_id, now)
            case WorkersSettled():
                self._fleet.settled = True
            case KvMoved():
                self._lifecycle.moved(event)
        return self._commands.copy()

    def plan(self) -> list[Command]:
        """All steps that can be sent now. The more events before it, the fuller they are.

        In passes, until no target takes another step: sequences are admitted, then every target is asked at which
        anything has changed since it was asked last.
        """
        self._commands.clear()
        progress, asked = True, list[TargetWorker]()
        while progress:
            preemptions = self._counters.preemptions
            progress = self._lifecycle.admit()
            for target in self._fleet.targets.values():
                if target.changed:
                    asked.append(target)
                    progress |= self._send(self._planner.plan(target, self._last_step_id + 1))
            # A preemption may have freed pages without a step: a waiting sequence may fit now.
            progress |= self._counters.preemptions > preemptions
        for target in asked:
            if target.releases and not target.outstanding:
                self._send(target.send(self._last_step_id + 1, (), Work()))
        self._commands.extend(map(WorkerDrained, self._fleet.drained()))
        return self._commands.copy()

    def _send(self, step: SendStep | None) -> bool:
        if step is None:
            return False
        self._last_step_id = step.step_id
        self._commands.append(step)
        return True

    def handle(self, events: Iterable[Event], now: float) -> list[Command]:
        """A batch of events, then one plan."""
        commands = [command for event in events for command in self.apply(event, now)]
        return commands + self.plan()

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

    def snapshot(self) -> Snapshot:
        live, targets = self._live, self._fleet.targets.values()
        states = Counter(sequence.state for sequence in live.running.values())
        totals = {each.name: deepcopy(getattr(self._counters, each.name)) for each in fields(Counters)}
        return Snapshot(
            **totals,
            waiting=len(live.waiting),
            running=len(live.running),
            max_running=self._fleet.max_running,
            live=len(live.sequences),
            prefilling=states[SequenceState.PREFILLING],
            idle=states[SequenceState.IDLE],
            verifying=states[SequenceState.VERIFYING],
            moving=states[SequenceState.MOVING],
            workers=(*map(_draft_snapshot, self._fleet.drafts.values()), *map(_target_snapshot, targets)),
            keys=tuple(
                KeySnapshot(
                    one.key.name, one.running, one.waiting, one.prompt_tokens, one.output_tokens, dict(one.refusals)
                )
                for one in live.accounts.totals()
            ),
            drafting_now=tuple(filter(None, map(_drafting_snapshot, targets))),
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

    # --- events -------------------------------------------------------------------------------------------------------

    def _submit(self, request: SequenceRequest, now: float) -> None:
        emit = self._commands.append
        if (invalid := self._find_fault(request)) is not None:
            emit(RefuseSequence(request.sequence_id, RefusalCause.INVALID, invalid))
            return
        if (ended := already_ended(request)) is not None:
            emit(FinishSequence(request.sequence_id, ended))
            return
        sequence = Sequence(request, next(self._live.orders), self._live.accounts.of(request.key))
        if self._fleet.targets and (misfit := self._lifecycle.misfit(sequence)) is not None:
            emit(RefuseSequence(request.sequence_id, RefusalCause.TOO_LONG, misfit))
            return
        waiting, config = self._live.waiting, self._config
        refusal = find_limit(sequence, waiting, config, now)
        if refusal is not None and self._lifecycle.admit():
            # Sequences that came since the last plan may have left the queue now.
            refusal = find_limit(sequence, waiting, config, now)
        if refusal is not None:
            limit, command = refusal
            sequence.account.refusals[limit] += 1
            emit(command)
            return
        if not is_known(sequence):
            # At once: of prompts that come together, not all find the same tokens.
            sequence.account.debit(len(request.prompt), now)
        self._live.sequences[request.sequence_id] = sequence
        waiting.push(sequence)

    def _find_fault(self, request: SequenceRequest) -> str | None:
        if request.sequence_id in self._live.sequences:
            return f"sequence_id {request.sequence_id} is taken by a live sequence"
        if not request.prompt:
            return "prompt is empty, must have at least 1 token"
        if request.max_tokens < 1:
            return f"max_tokens is {request.max_tokens}, must be at least 1"
        if request.draft_length is not None and request.draft_length < 0:
            return f"draft_length is {request.draft_length}, must be None or at least 0"
        if request.proposer and request.proposer not in PROPOSERS:
            return f"proposer is {request.proposer[:32]!r}, must be one of {', '.join(PROPOSERS)}"
        if not MIN_PRIORITY <= request.priority <= MAX_PRIORITY:
            return f"priority is {request.priority}, must be between {MIN_PRIORITY} and {MAX_PRIORITY}"
        return None

    def _join(self, spec: WorkerSpec, now: float) -> None:
        self._fleet.add(spec)
        self._assignment.renew(now)

    def _drain(self, worker_id: str, now: float) -> None:
        target, draft = self._fleet.targets.get(worker_id), self._fleet.drafts.get(worker_id)
        if target is not None:
            self._lifecycle.drain(target)
        elif draft is not None:
            self._fleet.drain(draft)
            self._assignment.renew(now)
        else:
            self._lifecycle.emit(WorkerDrained(worker_id))

    def _lose(self, event: WorkerLost, now: float) -> None:
        """Forgets everything in flight there. A target's sequences go elsewhere, with the tokens that they have."""
        target = self._fleet.remove(event.worker_id)
        if target is not None:
            suspects = [] if event.blameless or target.draining else in_flight(target)
            self._lifecycle.lose_target(target)
            blame(suspects, target.worker_id, event.reason, self._lifecycle)
        self._assignment.renew(now)


def _draft_snapshot(draft: DraftWorker) -> WorkerSnapshot:
    sequences = sum(len(target.sequences) for target in draft.targets.values())
    return WorkerSnapshot(draft.worker_id, Role.DRAFT, sequences, 0, 0, 0)


def _target_snapshot(target: TargetWorker) -> WorkerSnapshot:
    spec, running, steps = target.spec, len(target.sequences), len(target.outstanding)
    return WorkerSnapshot(spec.worker_id, spec.role, running, target.free_pages, spec.total_pages, steps)


def _drafting_snapshot(target: TargetWorker) -> DraftingSnapshot | None:
    """None until a draft length was chosen."""
    choice, model, lookup = target.figures.choice, target.figures.acceptance, target.figures.lookup
    if choice is None or model is None:
        return None
    proposer = target.worker_id if target.draft is None else target.draft.worker_id
    now = DraftingSnapshot(target.worker_id, proposer, choice.length, choice.gain, choice.rate, tuple(model.chances))
    if lookup is None or choice.lookup is None:
        return now
    return replace(now, lookup_share=lookup.share, lookup_length=choice.lookup, lookup_chances=tuple(lookup.chances))
