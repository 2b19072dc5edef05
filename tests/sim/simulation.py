"""A scheduler core in virtual time against workers in plain Python, and what must hold at every command."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from scheduler.config import Policy, SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.messages import (
    Command,
    EmitTokens,
    Event,
    FailSequence,
    FinishReason,
    FinishSequence,
    MoveKv,
    RefuseSequence,
    Role,
    Row,
    RowResult,
    RowStatus,
    SendStep,
    SequenceCancelled,
    SequenceRequest,
    SequenceSubmitted,
    StepCompleted,
    WorkerDrained,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from tests.sim.driver import assert_all_is_sent
from tests.sim.model import ModelWorker, plain_decoding
from tests.sim.moving_kv import MovingKv


@dataclass(eq=False)
class Seat:
    """A worker's place in the simulation: its steps in order, of which the first is running."""

    worker: ModelWorker
    steps: deque[SendStep] = field(default_factory=deque)
    unanswered: dict[int, SendStep] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    """How much KV of each sequence the last answer to one of its rows named."""
    alive: bool = True


@dataclass
class Output:
    request: SequenceRequest
    tokens: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    end: FinishSequence | FailSequence | RefuseSequence | None = None
    cancelled: bool = False


Fault = Callable[[ModelWorker, Row], RowResult | None]


class Simulation:
    """One core, its workers, and the clock. Checks what must hold at every command.

    Not `ample` are simulations in which pages run short: rows may then have to wait for pages. All events within
    `planning_lag` seconds of the first one are planned for together.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        seed: int = 0,
        latency: float = 0.001,
        ample: bool = True,
        planning_lag: float = 0.0,
    ) -> None:
        self.config = config
        self.core = SchedulerCore(config)
        self.random = random.Random(seed)
        self.latency = latency
        self.now = 0.0
        self.seats: dict[str, Seat] = {}
        self.outputs: dict[int, Output] = {}
        self.losses: dict[int, list[int]] = {}
        """Rows that were unanswered on a worker when it was lost, of every loss with one of the sequence."""
        self.fault: Fault | None = None
        self.ample = ample
        self.sent: list[tuple[float, SendStep]] = []
        self.proposed_at: dict[int, float] = {}
        self.moving_kv = MovingKv(self)
        self.drained: set[str] = set()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._planning_lag = planning_lag
        self._plan_is_due = False
        self._running = 0

    # --- scripting ---

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, action))

    def submit(self, time: float, request: SequenceRequest) -> None:
        def action() -> None:
            assert request.sequence_id not in self.outputs
            self.outputs[request.sequence_id] = Output(request, list(request.committed_output))
            self.handle(SequenceSubmitted(request))

        self.at(time, action)

    def cancel(self, time: float, sequence_id: int) -> None:
        def action() -> None:
            output = self.outputs.get(sequence_id)
            if output is not None and output.end is None:
                output.cancelled = True
            self.handle(SequenceCancelled(sequence_id))

        self.at(time, action)

    def join(self, time: float, worker: ModelWorker) -> None:
        def action() -> None:
            old = self.seats.get(worker.spec.worker_id)
            if old is not None:
                old.alive = False
                self._note_loss(old)
            self.drained.discard(worker.spec.worker_id)
            self.seats[worker.spec.worker_id] = Seat(worker)
            self.handle(WorkerJoined(worker.spec))

        self.at(time, action)

    def lose(self, time: float, worker_id: str) -> None:
        def action() -> None:
            seat = self.seats.pop(worker_id, None)
            self.drained.discard(worker_id)
            if seat is not None:
                seat.alive = False
                self._note_loss(seat)
                self.handle(WorkerLost(worker_id))
                # Answers that were on the wire when the worker died must do no harm.
                for step in list(seat.unanswered.values()):
                    self.handle(StepCompleted(worker_id, step.step_id, seat.worker.run(step), 0.01))

        self.at(time, action)

    def _note_loss(self, seat: Seat) -> None:
        rows = [row.sequence_id for step in seat.unanswered.values() for row in step.rows]
        for sequence_id in rows:
            self.losses.setdefault(sequence_id, []).append(len(rows))

    def drain(self, time: float, worker_id: str) -> None:
        """A worker that is to go: it is gone as soon as nothing is left on it."""

        def action() -> None:
            if worker_id in self.seats:
                self.drained.add(worker_id)
                self.handle(WorkerDraining(worker_id))

        self.at(time, action)

    def _leave(self, worker_id: str) -> None:
        if worker_id in self.drained:
            self.drained.remove(worker_id)
            seat = self.seats[worker_id]
            if seat.worker.spec.role is Role.TARGET:
                assert not seat.unanswered, "drained with steps in flight"
                assert not seat.worker.held, "drained with sequences left"
            self.lose(self.now, worker_id)

    def run(self, most_events: int = 200_000) -> None:
        """Until nothing is left to happen."""
        for _ in range(most_events):
            deadline = self.core.next_deadline()
            if deadline is not None and not self._plan_is_due and (not self._heap or deadline < self._heap[0][0]):
                assert deadline >= self.now, "a deadline in the past that the last plan did not act on"
                self.now = deadline
                self._plan()
                after = self.core.next_deadline()
                assert after is None or after > deadline, "a plan changed nothing"
            elif self._heap:
                self.now, _, action = heapq.heappop(self._heap)
                action()
            else:
                return
        raise AssertionError(f"the simulation does not end: {self.core.snapshot()}")

    # --- commands ---

    def handle(self, event: Event) -> None:
        self._carry_out(self.core.apply(event, self.now))
        self._check_running()
        if not self._planning_lag:
            self._plan()
        elif not self._plan_is_due:
            self._plan_is_due = True
            self.at(self.now + self._planning_lag, self._plan)

    def _plan(self) -> None:
        self._plan_is_due = False
        commands = self.core.plan(self.now)
        self._carry_out(commands)
        self._check_running()
        self._check_waits(commands)
        assert_all_is_sent(self.core, self.now)

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case SendStep():
                    self._send(command)
                case MoveKv():
                    self.moving_kv.start(command)
                case WorkerDrained():
                    self._leave(command.worker_id)
                case EmitTokens():
                    output = self.outputs[command.sequence_id]
                    assert output.end is None, "tokens after the end"
                    assert command.tokens, "an empty emission"
                    assert 0 <= command.accepted <= command.drafted
                    output.tokens.extend(command.tokens)
                    output.digests.extend(command.logits_digests)
                case FinishSequence() | FailSequence() | RefuseSequence():
                    output = self.outputs[command.sequence_id]
                    assert output.end is None, "a second end"
                    output.end = command

    def _send(self, step: SendStep) -> None:
        seat = self.seats[step.worker_id]
        self._check_step(seat, step)
        self.sent.append((self.now, step))
        seat.unanswered[step.step_id] = step
        seat.steps.append(step)
        if len(seat.steps) == 1:
            self._start(seat)

    def _start(self, seat: Seat) -> None:
        step = seat.steps[0]
        packed = sum(len(row.tokens) + len(row.draft_tokens) for row in step.rows)
        passes = max((row.draft_length for row in step.rows), default=0)
        target = seat.worker.spec.role is Role.TARGET
        seconds = (0.01 + 0.0002 * packed) if target else (0.001 + 0.0001 * packed + 0.001 * passes)
        seconds = seconds * self.random.uniform(0.8, 1.2) if step.rows else 0.0

        def finish() -> None:
            if not seat.alive:
                return
            results = self._execute(seat, step)
            seat.steps.popleft()
            if seat.steps:
                self._start(seat)
            self.at(self.now + self.latency, lambda: self._answer(seat, step, results, seconds))

        self.at(self.now + self.latency + seconds, finish)

    def _execute(self, seat: Seat, step: SendStep) -> tuple[RowResult, ...]:
        worker = seat.worker
        if self.fault is None:
            return worker.run(step)
        for sequence_id in step.released:
            worker.forget(sequence_id)
        return tuple(self.fault(worker, row) or worker.run_row(row) for row in step.rows)

    def _answer(self, seat: Seat, step: SendStep, results: tuple[RowResult, ...], seconds: float) -> None:
        if not seat.alive:
            return
        del seat.unanswered[step.step_id]
        for row, result in zip(step.rows, results, strict=True):
            seat.told[row.sequence_id] = result.kv_len
            if row.draft_length and result.status is RowStatus.OK:
                self.proposed_at[row.sequence_id] = self.now
        event = StepCompleted(step.worker_id, step.step_id, results, seconds)
        self.handle(event)
        if self.random.random() < 0.05:
            before = len(self.sent)
            self.handle(event)  # repeated answers do no harm
            assert len(self.sent) == before

    # --- checks ---

    def _check_step(self, seat: Seat, step: SendStep) -> None:
        config, spec = self.config, seat.worker.spec
        assert all(step.step_id > earlier for earlier in seat.unanswered)
        assert len(seat.unanswered) < config.steps_in_flight, "too many steps in flight"
        assert step.rows or step.released, "an empty step"
        ids = [row.sequence_id for row in step.rows]
        waiting = {row.sequence_id: row for other in seat.unanswered.values() for row in other.rows}
        assert len(set(ids)) == len(ids), "a sequence is twice in a step"
        for row in step.rows:
            before = waiting.get(row.sequence_id)
            if row.opening is not None:
                seat.told.pop(row.sequence_id, None)
            assert before is None or self._goes_on(seat, before, row), "a sequence is twice on its way"
        assert sum(len(row.tokens) + len(row.draft_tokens) for row in step.rows) <= spec.max_num_batched_tokens
        busy = any(other.rows for other in seat.unanswered.values())
        if busy and self.ample and spec.max_num_batched_tokens >= 256:
            self._check_worth_queueing(step)
        steady = 1 if spec.role is Role.TARGET else 2
        catching_up = sum(len(row.tokens) for row in step.rows if len(row.tokens) > steady)
        assert catching_up <= config.prefill_chunk, "too much catching up in one step"
        if spec.role is Role.DRAFT:
            assert sum(row.draft_length > 0 for row in step.rows) <= config.proposals_per_step
        elif step.group is not None:
            assert 1 <= step.group.rows <= config.batch_size
        for row in step.rows:
            output = self.outputs[row.sequence_id]
            assert output.end is None, "a row for a sequence that ended"
            known = [*output.request.prompt, *output.tokens]
            assert list(row.tokens) == known[row.kv_len : row.kv_len + len(row.tokens)], "not the committed tokens"
            if row.sample or row.draft_length:
                assert row.kv_len + len(row.tokens) == len(known), "chooses before the last committed token"
            most = len(output.request.prompt) + output.request.max_tokens
            if row.outcomes:
                assert row.outcomes <= config.draft_ahead
                assert row.draft_tokens == self._verified(row.sequence_id), "prepares for another verification"
                assert not busy, "prepares while there is something to do"
                assert len(known) + len(row.draft_tokens) + row.draft_length < most, "drafts past max_tokens"
            assert len(known) + max(row.draft_length, len(row.draft_tokens)) < most, "drafts past max_tokens"

    def _verified(self, sequence_id: int) -> tuple[int, ...]:
        """The draft tokens of a sequence that are with a target."""
        targets = [seat for seat in self.seats.values() if seat.worker.spec.role is Role.TARGET]
        rows = [row for seat in targets for step in seat.unanswered.values() for row in step.rows]
        return next(row.draft_tokens for row in rows if row.sequence_id == sequence_id)

    @staticmethod
    def _goes_on(seat: Seat, before: Row, row: Row) -> bool:
        """Whether the row is the next chunk of a prompt, and needs no answer to the one before it. It begins where that
        ends, or behind that, where an answer has told of more KV."""
        if before.outcomes:  # the target was sooner
            return row.draft_length > 0 and not row.outcomes
        chunk = not (before.sample or before.draft_length or row.draft_length or row.draft_tokens or row.opening)
        end = before.kv_len + len(before.tokens)
        return chunk and (row.kv_len == end or end < row.kv_len <= seat.told.get(row.sequence_id, 0))

    def _check_worth_queueing(self, step: SendStep) -> None:
        """Behind a target's running step one is queued where there was enough for a full one, even if the policy chose
        fewer rows of it, or where nothing more could have joined."""
        target = self.core._fleet.targets.get(step.worker_id)
        if target is not None and step.rows and target.coming.total:
            assert step.group is not None, "queued without a group"
            assert step.group.rows + len(target.drafted) >= self.config.batch_size, "queued too early"

    def _check_running(self) -> None:
        snapshot = self.core.snapshot()
        targets = self.core._fleet.targets.values()
        limit = self.config.max_running * sum(not target.draining for target in targets)
        # Those that run go on when a target begins to drain, but nobody comes to them.
        assert snapshot.running <= max(limit, self._running), "too many run"
        self._running = snapshot.running
        parts = snapshot.prefilling + snapshot.drafting + snapshot.drafted + snapshot.verifying + snapshot.moving
        assert parts == snapshot.running
        if self.config.policy is Policy.EQSPEC:
            for worker in snapshot.workers:
                assert worker.role is Role.DRAFT or worker.sequences <= self.config.batch_size

    def _check_waits(self, commands: list[Command]) -> None:
        """No drafted sequence is passed over, or left on an idle target, for longer than the bound."""
        if not self.ample:
            return
        for target in self.core._fleet.targets.values():
            waiting = target.drafted.first(len(target.drafted))
            overdue = [sequence for sequence in waiting if self.now >= sequence.due]
            assert all(earlier.due <= later.due for earlier, later in pairwise(waiting))
            if not overdue:
                continue
            seat = self.seats[target.worker_id]
            assert any(step.rows for step in seat.unanswered.values()), "overdue on an idle target"
            for step in commands:
                if isinstance(step, SendStep) and step.worker_id == target.worker_id and step.rows:
                    self._check_full_of_older(step, overdue[0].drafted_at, 1 + len(overdue[0].draft_tokens))

    def _check_full_of_older(self, step: SendStep, drafted_at: float, packed: int) -> None:
        if self.core._live.sequences[step.rows[0].sequence_id].suspected:
            assert len(step.rows) == 1, "a suspect shares a step"
            return
        group = step.rows[: step.group.rows] if step.group is not None else ()
        for row in group:
            assert self.core._live.sequences[row.sequence_id].drafted_at <= drafted_at, "an overdue row was passed over"
        if len(group) < self.config.batch_size:
            used = sum(1 + len(row.draft_tokens) for row in group)
            most = self.seats[step.worker_id].worker.spec.max_num_batched_tokens
            kept = min(self.config.prefill_chunk, most // 2)
            assert used + packed > most - kept, "an overdue row was left out of a step that had room"

    def check_end(self) -> None:
        """Everything ended, rightly; and nothing is left on any worker."""
        self.core.check_integrity()
        assert self.core.snapshot().live == 0, self.core.snapshot()
        for output in self.outputs.values():
            expected, reason = plain_decoding(output.request)
            match output.end:
                case FinishSequence(reason=FinishReason.CANCELLED):
                    assert output.cancelled
                    assert output.tokens == expected[: len(output.tokens)]
                case FinishSequence():
                    assert (output.tokens, output.end.reason) == (expected, reason)
                    assert output.digests == [t * 7 for t in expected[len(output.request.committed_output) :]]
                case FailSequence():
                    losses = self.losses[output.request.sequence_id]
                    assert len(losses) > 1, "failed without blame"
                    assert losses[-1] == 1, "failed for what others may have done"
                    assert output.tokens == expected[: len(output.tokens)]
                case RefuseSequence():
                    assert output.tokens == list(output.request.committed_output)
                case _:
                    raise AssertionError(f"ended with {output.end}")
        for seat in self.seats.values():
            assert not seat.worker.held, f"{seat.worker.spec.worker_id} still holds {list(seat.worker.held)}"
            assert not seat.unanswered
            seat.worker.pool.check_conservation([])
