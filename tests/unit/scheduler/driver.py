"""A core under manual control: the test decides when which worker answers what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.core import SchedulerCore
from spool.scheduler.messages import (
    Command,
    DraftingReport,
    EmitTokens,
    Event,
    FinishSequence,
    KvMoved,
    MoveKv,
    Role,
    Row,
    RowResult,
    SendStep,
    SequenceCancelled,
    SequenceRequest,
    SequenceSubmitted,
    StepCompleted,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerSpec,
)
from spool.scheduler.state.digests import DigestedTokens
from tests.support.core_state import check_state
from tests.unit.scheduler.model_worker import ModelWorker, plain_decoding

C = TypeVar("C", bound=Command)
Answer = Callable[[Row], RowResult | None]


def prompt_of(sequence_id: int, length: int) -> tuple[int, ...]:
    return tuple((sequence_id * 7 + place) % 50 for place in range(length))


class Driver:
    """Collects commands, keeps each target's unanswered steps in order, and answers the first of them on demand."""

    def __init__(self, **config: object) -> None:
        settings: dict[str, object] = {"policy": Policy.RAGGED, "wait_bound_steps": 1.0, **config}
        self.core = SchedulerCore(SchedulerConfig(**settings))  # type: ignore[arg-type]
        self.now = 0.0
        self.log: list[Command] = []
        self.workers: dict[str, ModelWorker] = {}
        self.steps: dict[str, list[SendStep]] = {}
        self.moves: dict[int, tuple[MoveKv, ModelWorker]] = {}
        """Moves of KV that were not answered, with the worker that each goes to."""

    def handle(self, *events: Event) -> list[Command]:
        commands = self.core.handle(events, self.now)
        self.log.extend(commands)
        for command in commands:
            if isinstance(command, SendStep):
                self.steps[command.worker_id].append(command)
            elif isinstance(command, MoveKv):
                self.moves[command.move_id] = command, self.workers[command.destination_id]
        check_state(self.core)
        return commands

    def join(
        self,
        worker_id: str,
        role: Role = Role.TARGET,
        pages: int = 1000,
        page_size: int = 4,
        max_length: int = 4000,
        packed: int = 512,
        guess: float = 1.0,
        head: str = "",
        **more: Any,
    ) -> list[Command]:
        spec = WorkerSpec(worker_id, role, page_size, pages, max_length, packed, own_draft_id=head, **more)
        if role is Role.TARGET:
            self.workers[worker_id] = ModelWorker(spec, guess)
            self.steps[worker_id] = []
        return self.handle(WorkerJoined(spec))

    def lose(self, worker_id: str) -> list[Command]:
        return self.handle(WorkerLost(worker_id))

    def drain(self, worker_id: str) -> list[Command]:
        return self.handle(WorkerDraining(worker_id))

    def moved(self, move: MoveKv, seconds: float = 0.01) -> list[Command]:
        """The KV has arrived, or not: it does not where the destination is gone or has opened the sequence itself."""
        _, worker = self.moves.pop(move.move_id)
        sequence_id = move.opening.sequence_id
        moved = self.workers.get(move.destination_id) is worker and sequence_id not in worker.held
        if moved:
            worker.held[sequence_id] = DigestedTokens(move.tokens)
        return self.handle(KvMoved(move.move_id, moved, seconds, 100))

    def submit(self, sequence_id: int, prompt_length: int = 3, max_tokens: int = 20, **more: object) -> list[Command]:
        request = SequenceRequest(sequence_id, prompt_of(sequence_id, prompt_length), max_tokens, **more)  # type: ignore[arg-type]
        return self.handle(SequenceSubmitted(request))

    def cancel(self, sequence_id: int) -> list[Command]:
        return self.handle(SequenceCancelled(sequence_id))

    def plan(self) -> list[Command]:
        return self.handle()

    def answer(
        self,
        worker_id: str,
        instead: Answer | None = None,
        seconds: float = 0.05,
        report: DraftingReport | None = None,
        drafting_seconds: float = 0.0,
    ) -> list[Command]:
        """The worker's oldest step is done; `instead` may answer a row in the worker's place. `report`: on its draft,
        where one serves it; by default, what it verified was there in time."""
        step = self.steps[worker_id].pop(0)
        worker = self.workers[worker_id]
        for sequence_id in step.released:
            worker.forget(sequence_id)
        results = tuple((instead and instead(row)) or worker.run_row(row) for row in step.rows)
        if report is None and step.grant is not None:
            asked = sum(row.verify > 0 for row in step.rows)
            report = DraftingReport(True, asked, asked)
        return self.handle(StepCompleted(worker_id, step.step_id, results, seconds, report, drafting_seconds))

    def settle(self, *worker_ids: str, max_steps: int = 1000) -> None:
        """Answers all steps, worker by worker in turn, until none is left; without names, all moves of KV as well."""
        ids = worker_ids or tuple(self.steps)
        for _ in range(max_steps):
            waiting = [worker_id for worker_id in ids if self.steps[worker_id]]
            moves = not worker_ids and bool(self.moves)
            if not waiting and not moves:
                return
            if moves:
                for move, _ in list(self.moves.values()):
                    self.moved(move)
            for worker_id in waiting:
                if self.steps[worker_id]:
                    self.answer(worker_id)
        raise AssertionError("the workers never come to rest")

    def until_asked(self, worker_id: str, asked: Callable[[Row], object]) -> Row:
        """Answers workers in turn until a row of this worker's first step is of this kind."""
        for _ in range(100):
            for row in self.steps[worker_id][0].rows if self.steps[worker_id] else ():
                if asked(row):
                    return row
            self.answer(next(name for name, steps in self.steps.items() if steps))
        raise AssertionError("never asked")

    def only_step(self, worker_id: str) -> SendStep:
        (step,) = self.steps[worker_id]
        return step


def of_type(commands: list[Command], kind: type[C]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def pair(**config: object) -> Driver:
    """One target and one draft that serves it, whose guesses are always right."""
    driver = Driver(**config)
    driver.join("target")
    driver.join("draft", Role.DRAFT)
    return driver


def outputs(driver: Driver, sequence_id: int) -> list[int]:
    """Tokens that a sequence got."""
    return [
        token
        for emitted in of_type(driver.log, EmitTokens)
        if emitted.sequence_id == sequence_id
        for token in emitted.tokens
    ]


def expected(driver: Driver, sequence_id: int) -> list[int]:
    """Tokens that it should get."""
    request = next(
        row.opening
        for step in of_type(driver.log, SendStep)
        for row in step.rows
        if row.sequence_id == sequence_id and row.opening is not None
    )
    return plain_decoding(request)[0]


def check_to_the_end(driver: Driver, *sequence_ids: int) -> None:
    """Everything as plain decoding has it, each sequence finished once, and nothing left with any worker."""
    driver.settle()
    for sequence_id in sequence_ids:
        assert outputs(driver, sequence_id) == expected(driver, sequence_id)
        assert [end.sequence_id for end in of_type(driver.log, FinishSequence)].count(sequence_id) == 1
    for worker in driver.workers.values():
        assert not worker.held
    assert all(worker.free_pages == worker.total_pages for worker in driver.core.snapshot().workers)
