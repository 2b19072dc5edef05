"""Simulated workers: the real servers, registration, executor, proposers and page pools, over models of arithmetic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spool.engine.drafting.inside_target import InsideDrafting
from spool.engine.drafting.lookup.text_store import TextStore
from spool.engine.drafting.model_drafting import ModelDrafting
from spool.engine.drafting.proposer import Asked, Lookup, Proposers
from spool.engine.steps import Computing, ProposeRow, VerifyRow
from spool.protos import worker_pb2
from spool.services.worker.drafting.remote import RemoteProposer
from spool.services.worker.drafting.server import DraftServer
from spool.services.worker.drafting.stream import StreamOptions
from spool.services.worker.executor import Reply, StepExecutor
from spool.services.worker.registration import RegistrationOptions, WorkerRegistration
from spool.services.worker.server import WorkerServer
from tests.sim.cell.plan import LOOKUP, OWN, WorkerPlan
from tests.sim.cell.process import Process
from tests.sim.cell.virtual_threads import VirtualThread
from tests.sim.cell.virtual_time import result_of
from tests.support.paged_model import VOCABULARY, AnyRow, PagedModel

if TYPE_CHECKING:
    from tests.sim.cell.world import World

# Shorter than in service, so that what they wait for happens within a schedule.
REGISTRATION_OPTIONS = RegistrationOptions(interval=0.5, retry_interval=0.2, call_timeout=1.0)
STREAM_OPTIONS = StreamOptions(connect_timeout=0.5, silence_timeout=0.5, first_backoff=0.05, longest_backoff=0.5)

_TRANSFER_SECONDS = 0.0005

# Books are compared every so many steps, since that touches all of them.
_CHECK_EVERY = 61

EXCUSES = {"lost kv", "row trouble", "duplicate and reorder", "kv damaged"}
"""Faults after which a worker may answer that it has other KV, or less, than its scheduler counts on."""


class SimulatedWorker(ABC):
    """One start of a worker."""

    server: Any
    model: PagedModel

    def __init__(self, world: World, plan: WorkerPlan, epoch: int) -> None:
        self.world = world
        self.plan = plan
        self.epoch = epoch
        self.cell = world.cells[plan.cell]
        self.process = Process(world.network, plan.worker_id)
        self.slowness = 1.0
        self.stalled_until = 0.0
        self.computing_until = 0.0
        """When what was begun last ends."""
        self.leaving = False
        self.thread = VirtualThread(world.network.threads, self.process)
        self.arrived = 0.0
        """When that came which is computed now."""
        self.process.run(self._start)

    @abstractmethod
    def _serve(self) -> Any:
        """The server of the worker."""

    @property
    @abstractmethod
    def draining(self) -> bool: ...

    @abstractmethod
    def lose_kv(self, most: int) -> None:
        """Of so many sequences."""

    @abstractmethod
    def check_idle(self) -> str | None:
        """What is left here that should not be, once all sequences have ended."""

    def change_acceptance(self, acceptance: float) -> None:
        """Of what the worker proposes, so many may be right."""
        self.model.acceptance = acceptance

    def _start(self) -> None:
        self.server = self._serve()
        self.registration = WorkerRegistration(
            self.plan.worker_id,
            result_of(self.server.start()),
            self.server,
            lambda: self.cell.resolve(self.process),
            security=self.process,  # type: ignore[arg-type]
            options=REGISTRATION_OPTIONS,
        )
        self.registration.start()

    def _model(self, pages: int, own_draft_id: str = "", computed: Any = None) -> PagedModel:
        plan, world = self.plan, self.world
        return PagedModel(
            pages,
            plan.page_size,
            world.plan.longest,
            plan.max_num_batched_tokens,
            plan.acceptance,
            computed or self._computes,
            world.plan.windows,
            own_draft_id,
            lambda: self._spend(_TRANSFER_SECONDS),
        )

    async def leave(self, seconds: float) -> None:
        self.leaving = True
        await self.registration.leave(seconds)

    def _spend(self, seconds: float) -> None:
        """On the thread that computes: time passes."""
        seconds = max(seconds * self.slowness, self.stalled_until - self.world.loop.now)
        self.computing_until = self.world.loop.now + seconds
        self.thread.pause(seconds)

    @abstractmethod
    def _computes(self, rows: Sequence[AnyRow]) -> None:
        """On the thread that computes: a step of the model."""

    def _meet_poisons(self, rows: Sequence[AnyRow]) -> None:
        whole = [row for row in rows if len(row.history) >= row.prompt_length]
        self.world.faults.poisons.computed(self, (tuple(row.history[: row.prompt_length]) for row in whole))

    def _spread(self) -> float:
        """No two steps take the same time."""
        return 0.8 + 0.4 * self.world.rng.random()


class SimulatedTarget(SimulatedWorker):
    def __init__(self, world: World, plan: WorkerPlan, epoch: int) -> None:
        self.held: dict[int, None] = {}
        """Sequences that the worker has KV of, by its replies."""
        self.losing: set[int] = set()
        """Of these, those whose KV is lost before the next step."""
        self.own_draft: PagedModel | None = None
        super().__init__(world, plan, epoch)

    def _serve(self) -> WorkerServer:
        plan, worker = self.plan, self
        self.model = self._model(plan.pages, plan.own_draft)
        if plan.release:
            self.model.description = replace(self.model.description, fingerprint={"spool": plan.release})
        lookup, draft, remote = None, None, None
        if plan.own_draft == LOOKUP:
            lookup = Lookup(1, TextStore(1 << 20))
        elif plan.own_draft == OWN:
            self.own_draft = self._model(plan.pages, computed=self._drafts)
            draft = InsideDrafting(ModelDrafting(self.own_draft, prefix_cache=True))
        else:
            draft = remote = RemoteProposer(VOCABULARY, self.process, STREAM_OPTIONS)  # type: ignore[arg-type]

        class Watched(StepExecutor):
            def execute(self, request: worker_pb2.StepRequest, arrived: float, computing: Computing) -> Reply:
                worker.arrived = arrived
                # What was lost is as if the worker had released it, with the next step that does something.
                if request.step_id:
                    request.released_sequence_ids.extend(sorted(worker.losing))
                    worker.losing.clear()
                reply = super().execute(request, arrived, computing)
                worker.heed(request, reply())
                return reply

        class Timed(Proposers):
            def take(self, asked: Sequence[Asked], wait_seconds: float) -> list[Sequence[int]]:
                began = worker.world.loop.now
                taken = super().take(asked, wait_seconds)
                worker.check_wait(worker.world.loop.now - began, wait_seconds)
                return taken

        proposer = Timed(lookup, draft)
        self.executor = Watched(
            self.model,
            self.epoch,
            self.thread.clock,
            kv_store=self.model.kv_store,
            proposer=proposer,
            remote=remote,
        )
        return WorkerServer(self.executor, thread=self.thread, security=self.process)  # type: ignore[arg-type]

    @property
    def draining(self) -> bool:
        return self.executor.draining

    def change_acceptance(self, acceptance: float) -> None:
        if self.own_draft is not None:
            self.own_draft.acceptance = acceptance

    def lose_kv(self, most: int) -> None:
        for sequence_id in self.world.rng.sample(list(self.held), min(most, len(self.held))):
            if self.world.faults.may_lose_kv(self, sequence_id):
                self.losing.add(sequence_id)

    def _computes(self, rows: Sequence[AnyRow]) -> None:
        plan, world = self.plan, self.world
        packed = reading = 0
        for row in rows:
            assert isinstance(row, VerifyRow)
            packed += len(row.tokens) + len(row.draft_tokens)
            reading += row.table.length
            world.verified += len(row.draft_tokens)
            world.served += len(row.draft_tokens) * (not plan.own_draft and not row.drafting.expected)
            if world.auditor is not None and row.sample:
                world.auditor.computes(self.process, row.drafting.sequence_id, row.history, row.draft_tokens)
        seconds = plan.base_seconds + plan.kv_seconds * reading + plan.row_seconds * packed
        self._spend(seconds * self._spread())
        self._meet_poisons(rows)

    def _drafts(self, rows: Sequence[AnyRow]) -> None:
        """Its own draft, behind the reply."""
        plan = self.plan
        self._spend(_draft_seconds(rows, plan.own_seconds, plan.own_row_seconds, plan.own_kv_seconds) * self._spread())

    def check_wait(self, seconds: float, most: float) -> None:
        """Of a step, for proposals."""
        if seconds > most + 1e-6:
            self.world.fail(
                f"{self.plan.worker_id}: a step waits {seconds:.4f} s for proposals, wait_seconds is {most}"
            )

    def heed(self, request: worker_pb2.StepRequest, reply: worker_pb2.StepReply) -> None:
        world, worker_id = self.world, self.plan.worker_id
        for sequence_id in request.released_sequence_ids:
            self.held.pop(sequence_id, None)
        ids = [*(row.sequence_id for row in request.rows), *request.following.sequence_ids]
        ok = worker_pb2.ROW_STATUS_OK
        statuses = list(reply.rows.statuses) or [ok] * len(ids) * (reply.status == worker_pb2.STEP_STATUS_OK)
        for sequence_id, status in zip(ids, statuses, strict=False):
            if status == ok:
                self.held[sequence_id] = None
            else:
                self.held.pop(sequence_id, None)
        world.reused += sum(reply.rows.reused)
        # Nothing may follow a row that has ended its sequence, whose end the scheduler has not known yet.
        bad = [place for place, status in enumerate(statuses[: len(request.rows)]) if status != ok]
        if bad and not world.faults.struck.keys() & EXCUSES:
            errors = [one.error for one in reply.rows.details if one.row == bad[0]]
            world.fail(f"{worker_id}: row of {ids[bad[0]]} failed unprovoked: {statuses[bad[0]]} {errors}")
        if ids or len(request.released_sequence_ids) or reply.status != worker_pb2.STEP_STATUS_OK:
            failed = tuple(statuses[place] for place in bad)
            counts = tuple(reply.rows.counts)
            world.note("step", worker_id, request.scheduler_epoch, request.step_id, tuple(ids), reply.status, counts)
            if failed:
                world.note("failed rows", worker_id, request.step_id, failed)
        if request.step_id % _CHECK_EVERY == 0 and (problem := self._broken()):
            world.fail(problem)

    def check_idle(self) -> str | None:
        plan, executor = self.plan, self.executor
        if executor.sequences or executor.free_pages != plan.pages:
            return f"{plan.worker_id} holds {executor.sequences} sequences and {plan.pages - executor.free_pages} pages"
        if self.own_draft is not None and self.own_draft.pool.free_pages != plan.pages:
            return f"the draft of {plan.worker_id} holds {plan.pages - self.own_draft.pool.free_pages} pages"
        return self._broken()

    def _broken(self) -> str | None:
        try:
            self.executor.check_integrity()
        except RuntimeError as error:
            return f"{self.plan.worker_id}: {error}"
        return None


class SimulatedDraft(SimulatedWorker):
    def _serve(self) -> DraftServer:
        self.model = self._model(self.plan.pages)
        return DraftServer(
            self.model,
            worker_epoch=self.epoch,
            thread=self.thread,  # type: ignore[arg-type]
            security=self.process,  # type: ignore[arg-type]
            ahead=self.plan.ahead,
        )

    @property
    def draining(self) -> bool:
        return not self.registration.in_use

    def lose_kv(self, most: int) -> None:
        """A draft that has lost KV computes it anew, and nobody hears of it."""

    def _computes(self, rows: Sequence[AnyRow]) -> None:
        plan = self.plan
        self.arrived = self.world.loop.now
        self._spend(_draft_seconds(rows, plan.base_seconds, plan.row_seconds, plan.kv_seconds) * self._spread())
        self._meet_poisons(rows)

    def check_idle(self) -> str | None:
        used = self.plan.pages - self.model.pool.free_pages
        # Where links broke, a target may tell it only with its next step which sequences are no more.
        if (used and not self.server.sequences) or (self.server.sequences and not self.world.faults.struck):
            return f"{self.plan.worker_id} holds {used} pages, and {self.server.sequences} sequences"
        return None


def _draft_seconds(rows: Sequence[AnyRow], base: float, row: float, kv: float) -> float:
    """Of all passes of a step of a draft. The first reads what is missing, each other one a token of each row."""
    passes = max(1, max((one.draft_length for one in rows if isinstance(one, ProposeRow)), default=0))
    packed = sum(len(one.tokens) for one in rows) + (passes - 1) * len(rows)
    return (base + kv * sum(one.table.length for one in rows)) * passes + row * packed
