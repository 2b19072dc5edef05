"""A simulated worker: the real server, registration, step executor and page pool, over a model that is arithmetic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.steps import Computing, RowOutcome
from protos import worker_pb2, worker_pb2_grpc
from scheduler.messages import Role
from services.worker.executor import DraftStepExecutor, StepExecutor, TargetStepExecutor
from services.worker.registration import RegistrationOptions, WorkerRegistration
from services.worker.sequences import PreparedRow
from services.worker.server import WorkerServer
from tests.sim.cell.paged_model import PagedModel
from tests.sim.cell.plan import WorkerPlan
from tests.sim.cell.process import Process
from tests.sim.cell.toy_grammar import fits
from tests.sim.cell.virtual_time import VirtualThread

if TYPE_CHECKING:
    from tests.sim.cell.world import World

# Shorter than in service, so that what they wait for happens within a schedule.
REGISTRATION_OPTIONS = RegistrationOptions(interval=0.5, retry_interval=0.2, call_timeout=1.0)

_TRANSFER_SECONDS = 0.0005

# Books are compared every so many steps, since that touches all of them.
_CHECK_EVERY = 61


class StepWatch:
    """What must hold of every reply of a worker, whatever happens around it."""

    def __init__(
        self, world: World, worker_id: str, draining: Callable[[], bool], expect_close: Callable[[int], None]
    ) -> None:
        self.draining = draining
        self._expect_close = expect_close
        self._world = world
        self._worker_id = worker_id
        self._highest_epoch = 0
        self._last_step = (0, 0)
        self.forgotten: set[int] = set()
        self.troubled: set[int] = set()

    def lost(self, sequence_id: int) -> bool:
        """Whether a fault has taken the sequence's KV, or may have."""
        return sequence_id in self.forgotten or sequence_id in self.troubled

    def check(self, request: worker_pb2.StepRequest, reply: worker_pb2.StepReply) -> None:
        fenced = request.scheduler_epoch < self._highest_epoch
        if reply.status != worker_pb2.STEP_STATUS_WRONG_EPOCH:  # such a request was for an earlier start of the worker
            self._highest_epoch = max(self._highest_epoch, request.scheduler_epoch)
        world, worker_id = self._world, self._worker_id
        if len(request.rows) or len(request.released_sequence_ids) or reply.status != worker_pb2.STEP_STATUS_OK:
            statuses = tuple(row.status for row in reply.rows if row.status != worker_pb2.ROW_STATUS_OK)
            ids = tuple(row.sequence_id for row in request.rows)
            world.note("step", worker_id, request.scheduler_epoch, request.step_id, ids, reply.status, statuses)
        if fenced:
            if reply.status not in (worker_pb2.STEP_STATUS_FENCED, worker_pb2.STEP_STATUS_WRONG_EPOCH):
                world.fail(f"{worker_id} answered a fenced scheduler with status {reply.status}")
            self._expect_close(request.scheduler_epoch)
            return
        if reply.status == worker_pb2.STEP_STATUS_INVALID and not (world.network.meddled or self.draining()):
            world.fail(f"{worker_id} refused step {request.step_id}: {reply.error}")
        step = (request.scheduler_epoch, request.step_id)
        if step > self._last_step:  # else it is the reply of before, which says nothing of the present
            self._last_step = step
            for row in reply.rows:
                self._check_row(row)
            world.ahead_rows += sum(row.outcomes > 0 for row in request.rows)

    def _check_row(self, row: worker_pb2.RowReply) -> None:
        match row.status:
            case worker_pb2.ROW_STATUS_OK:
                self.forgotten.discard(row.sequence_id)
                self._world.reused += row.reused
            case worker_pb2.ROW_STATUS_UNKNOWN_SEQUENCE | worker_pb2.ROW_STATUS_KV_MISMATCH:
                # A chunk of a prompt that overtook the one before it is refused.
                if not (self.lost(row.sequence_id) or self._world.network.meddled):
                    self._world.fail(f"{self._worker_id}: KV of {row.sequence_id} was lost unprovoked: {row.error}")
            case worker_pb2.ROW_STATUS_OUT_OF_PAGES | worker_pb2.ROW_STATUS_FAILED:
                # A release that was overtaken leaves less room than the scheduler reckons with.
                overtaken = row.status == worker_pb2.ROW_STATUS_OUT_OF_PAGES and self._world.network.meddled
                if "injected" not in row.error and not overtaken:
                    self._world.fail(f"{self._worker_id}: row of {row.sequence_id} failed unprovoked: {row.error}")
                self.troubled.add(row.sequence_id)
            case _:
                self._world.fail(f"{self._worker_id}: row of {row.sequence_id} has status {row.status}: {row.error}")


class SimulatedWorker:
    """One start of a worker."""

    def __init__(self, world: World, plan: WorkerPlan, epoch: int) -> None:
        self.world = world
        self.plan = plan
        self.cell = world.cells[plan.cell]
        self.process = Process(world.network, plan.worker_id)
        self.slowness = 1.0
        self.stalled_until = 0.0
        self.leaving = False
        loop = world.loop
        self.thread = VirtualThread(loop, self._seconds)
        self.model = PagedModel(
            plan.pages,
            plan.page_size,
            world.plan.longest,
            plan.max_num_batched_tokens,
            plan.acceptance,
            self.thread.computed,
        )
        self.watch = StepWatch(world, plan.worker_id, lambda: self.executor.draining, self.cell.expect_close)
        watch, worker = self.watch, self
        kind: type[StepExecutor[Any]] = TargetStepExecutor if plan.role is Role.TARGET else DraftStepExecutor

        class Watched(kind):  # type: ignore[misc,valid-type]
            def execute(
                self, request: worker_pb2.StepRequest, arrived: float, computing: Computing
            ) -> worker_pb2.StepReply:
                repeated = request.scheduler_epoch == self._scheduler_epoch and request.step_id in self._replies
                reply = super().execute(request, arrived, computing)
                watch.check(request, reply)
                try:
                    if request.step_id % _CHECK_EVERY == 0:
                        self.check_integrity()
                    self._check_prepared(request)
                except RuntimeError as error:
                    world.fail(f"{plan.worker_id}: {error}")
                if world.faults.poisons.prompts and not repeated:  # nothing was computed for one that was
                    self._poison(request, arrived)
                return reply

            def _check_prepared(self, request: worker_pb2.StepRequest) -> None:
                """What was computed for outcomes has left the sequences' own KV alone."""
                for row in request.rows:
                    held = self._sequences._sequences.get(row.sequence_id)
                    if row.outcomes and held is not None:
                        worker.model.check(held.table, held.history)

            def _settle(self, prepared: PreparedRow, outcome: RowOutcome) -> worker_pb2.RowReply:
                sequence = prepared.sequence
                grammar = sequence.sampling.grammar
                if plan.role is Role.DRAFT and grammar is not None:
                    output = [*sequence.history[sequence.prompt_length :], *outcome.tokens]
                    if not fits(grammar, output):
                        world.fail(f"{plan.worker_id} proposed {outcome.tokens}, which {grammar.definition} forbids")
                return super()._settle(prepared, outcome)

            def _poison(self, request: worker_pb2.StepRequest, arrived: float) -> None:
                held = [self._sequences._sequences.get(row.sequence_id) for row in request.rows]
                whole = [one for one in held if one and len(one.history) >= one.prompt_length]
                prompts = {tuple(one.history[: one.prompt_length]) for one in whole}
                world.faults.poisons.computed(worker, arrived, prompts)

        self.executor: StepExecutor[Any] = Watched(self.model, epoch, self.thread.clock, kv_store=self.model.kv_store)
        self.address = f"{plan.worker_id}:1"
        self.process.run(self._start)

    def _start(self) -> None:
        self.server = WorkerServer(self.executor, thread=self.thread, security=self.process)  # type: ignore[arg-type]
        add = worker_pb2_grpc.add_WorkerServicer_to_server
        self.world.network.listen(self.address, self.process, add, self.server)
        self.registration = WorkerRegistration(
            self.plan.worker_id,
            self.address,
            self.server,
            lambda: self.cell.resolve(self.process),
            security=self.process,  # type: ignore[arg-type]
            options=REGISTRATION_OPTIONS,
        )
        self.registration.start()

    async def leave(self, seconds: float) -> None:
        self.leaving = True
        await self.registration.leave(seconds)

    def _seconds(self, request: object, *arguments: object) -> list[float]:
        """Of a step, or of reading or writing pages between two of them. One that prepares may end after each pass."""
        if any(isinstance(argument, asyncio.Future) and argument.cancelled() for argument in arguments):
            return [0.0]  # a step that nobody waits for any more
        stalled = self.stalled_until - self.world.loop.now
        if not isinstance(request, worker_pb2.StepRequest):
            return [max(_TRANSFER_SECONDS * self.slowness, stalled)]
        packed = passes = outcomes = reading = 0
        for row in request.rows:
            packed += len(row.tokens) + row.known_tokens + len(row.draft_tokens)
            passes = max(passes, row.draft_length)
            outcomes += row.outcomes
            reading += row.kv_len
        if not packed:
            return [max(0.0, stalled)]
        base, of_row = self.plan.base_seconds + self.plan.kv_seconds * reading, self.plan.row_seconds
        slowness = self.slowness * (0.8 + 0.4 * self.world.rng.random())
        if not outcomes:
            return [max((base * max(1, passes) + of_row * packed) * slowness, stalled)]
        return [
            max((base * (1 + later) + of_row * (packed + outcomes * later)) * slowness, stalled)
            for later in range(passes + 1)
        ]

    def check_idle(self) -> str | None:
        """What is left here that should not be, once all sequences have ended."""
        try:
            self.executor.check_integrity()
        except RuntimeError as error:
            return f"{self.plan.worker_id}: {error}"
        if self.executor.sequences or self.executor.free_pages != self.plan.pages:
            return (
                f"{self.plan.worker_id} holds {self.executor.sequences} sequences and "
                f"{self.plan.pages - self.executor.free_pages} pages"
            )
        return None
