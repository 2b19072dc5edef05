"""A simulated worker: the real server, registration, step executor and page pool, over a model that is arithmetic."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.steps import Computing
from protos import worker_pb2
from scheduler.messages import Role
from services.worker.executor import DraftStepExecutor, StepExecutor, TargetStepExecutor
from services.worker.registration import RegistrationOptions, WorkerRegistration
from services.worker.server import WorkerServer
from tests.sim.cell.paged_model import AnyRow, PagedModel
from tests.sim.cell.plan import WorkerPlan
from tests.sim.cell.process import Process
from tests.sim.cell.virtual_time import VirtualThread, result_of

if TYPE_CHECKING:
    from tests.sim.cell.world import World

# Shorter than in service, so that what they wait for happens within a schedule.
REGISTRATION_OPTIONS = RegistrationOptions(interval=0.5, retry_interval=0.2, call_timeout=1.0)

_TRANSFER_SECONDS = 0.0005

# Books are compared every so many steps, since that touches all of them.
_CHECK_EVERY = 61

EXCUSES = {"lost kv", "row trouble", "duplicate and reorder", "kv damaged"}
"""Faults after which a worker may answer that it has other KV, or less, than its scheduler counts on."""


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
            self._computed,
            world.plan.windows,
            "head" if plan.head_seconds else "",
        )
        self.arrived = 0.0
        """When the step came that runs now."""
        self.held: dict[int, None] = {}
        """Sequences that the worker has KV of, by its replies."""
        self.losing: set[int] = set()
        """Of these, those whose KV is lost before the next step."""
        kind: type[StepExecutor[Any]] = TargetStepExecutor if plan.role is Role.TARGET else DraftStepExecutor
        worker = self

        class Watched(kind):  # type: ignore[misc,valid-type]
            def execute(
                self, request: worker_pb2.StepRequest, arrived: float, computing: Computing
            ) -> worker_pb2.StepReply:
                worker.arrived = arrived
                # What was lost is as if the worker had released it, with the next step that does something.
                if request.step_id:
                    request.released_sequence_ids.extend(sorted(worker.losing))
                    worker.losing.clear()
                reply = super().execute(request, arrived, computing)
                worker.heed(request, reply)
                return reply

        self.executor: StepExecutor[Any] = Watched(self.model, epoch, self.thread.clock, kv_store=self.model.kv_store)
        self.process.run(self._start)

    def _start(self) -> None:
        self.server = WorkerServer(self.executor, thread=self.thread, security=self.process)  # type: ignore[arg-type]
        self.registration = WorkerRegistration(
            self.plan.worker_id,
            result_of(self.server.start()),
            self.server,
            lambda: self.cell.resolve(self.process),
            security=self.process,  # type: ignore[arg-type]
            options=REGISTRATION_OPTIONS,
        )
        self.registration.start()

    def _computed(self, rows: Sequence[AnyRow]) -> None:
        self.thread.computed()
        whole = [row for row in rows if len(row.history) >= row.prompt_length]
        self.world.faults.poisons.computed(self, (tuple(row.history[: row.prompt_length]) for row in whole))

    def heed(self, request: worker_pb2.StepRequest, reply: worker_pb2.StepReply) -> None:
        world, worker_id = self.world, self.plan.worker_id
        for sequence_id in request.released_sequence_ids:
            self.held.pop(sequence_id, None)
        # Nothing may follow a row that has ended its sequence, whose end the scheduler has not known yet.
        answered = reply.rows[: len(request.rows)]
        bad = [answer for answer in answered if answer.status != worker_pb2.ROW_STATUS_OK]
        for row in reply.rows:
            if row.status == worker_pb2.ROW_STATUS_OK:
                self.held[row.sequence_id] = None
                world.reused += row.reused
            else:
                self.held.pop(row.sequence_id, None)
        world.ahead_rows += sum(row.outcomes > 0 for row in request.rows)
        if bad and not world.faults.struck.keys() & EXCUSES:
            world.fail(f"{worker_id}: row of {bad[0].sequence_id} failed unprovoked: {bad[0]}")
        if (
            len(request.rows)
            or len(reply.followed.counts)
            or len(request.released_sequence_ids)
            or reply.status != worker_pb2.STEP_STATUS_OK
        ):
            ids = (*(row.sequence_id for row in request.rows), *request.following.sequence_ids)
            statuses = tuple(row.status for row in bad)
            world.note("step", worker_id, request.scheduler_epoch, request.step_id, ids, reply.status, statuses)
        if request.step_id % _CHECK_EVERY == 0 and (problem := self._broken()):
            world.fail(problem)

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
        packed += len(request.following.kv_lens)
        reading += sum(request.following.kv_lens)
        if not packed:
            return [max(0.0, stalled)]
        base, of_row = self.plan.base_seconds + self.plan.kv_seconds * reading, self.plan.row_seconds
        slowness = self.slowness * (0.8 + 0.4 * self.world.rng.random())
        if self.plan.role is Role.TARGET:
            base, passes = base + self.plan.head_seconds * passes, 1
        if not outcomes:
            return [max((base * max(1, passes) + of_row * packed) * slowness, stalled)]
        return [
            max((base * (1 + later) + of_row * (packed + outcomes * later)) * slowness, stalled)
            for later in range(passes + 1)
        ]

    def check_idle(self) -> str | None:
        """What is left here that should not be, once all sequences have ended."""
        if self.executor.sequences or self.executor.free_pages != self.plan.pages:
            return (
                f"{self.plan.worker_id} holds {self.executor.sequences} sequences and "
                f"{self.plan.pages - self.executor.free_pages} pages"
            )
        return self._broken()

    def _broken(self) -> str | None:
        try:
            self.executor.check_integrity()
        except RuntimeError as error:
            return f"{self.plan.worker_id}: {error}"
        return None
