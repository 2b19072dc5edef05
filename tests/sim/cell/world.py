"""Cells of simulated processes under load: who lives, what happens to them, and what must hold of all of them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

from spool.scheduler.messages import Role
from tests.sim.audit.auditor import Auditor
from tests.sim.cell.faults import DISTURBING, HARMLESS_TO_LINKS, HARMLESS_TO_OTHERS, HARMLESS_TO_TARGETS, Faults
from tests.sim.cell.gateway import ClientCall, SimulatedGateway
from tests.sim.cell.plan import POISON, Fault, Plan, WorkerPlan
from tests.sim.cell.process import Process
from tests.sim.cell.rpc.network import Network
from tests.sim.cell.scheduler import CellSchedulers, SimulatedScheduler
from tests.sim.cell.virtual_threads import Threads
from tests.sim.cell.virtual_time import VirtualLoop
from tests.sim.cell.worker import SimulatedDraft, SimulatedTarget, SimulatedWorker

MOST_SECONDS = 30.0
"""Virtual seconds within which everything must have ended once nothing goes wrong any more."""
MOST_IDLE_SECONDS = 8.0
"""After that, within which everything that was held must be free: leases run out, lost connections are noticed."""

_LONGEST_STEP = 0.1
"""Seconds that no step takes, unless the worker stalls."""

AUDIT_EVERY = 2
"""One schedule in so many is audited, which takes a sixth longer; 0: none. None with several cells is: the auditor
follows a sequence by its number, which is another one in each cell."""


class World:
    def __init__(self, loop: VirtualLoop, threads: Threads, plan: Plan, rng: random.Random) -> None:
        self.loop = loop
        self.plan = plan
        self.rng = rng
        self.faults = Faults(self)
        self.network = Network(loop, threads, rng, plan.latency)
        self.auditor: Auditor | None = None
        if AUDIT_EVERY and plan.cells == 1 and plan.seed % AUDIT_EVERY == 0:
            self.auditor = self.network.tap = Auditor(loop.time, self.fail)
        self.calls: list[ClientCall] = []
        self.reused = 0
        self.verified = 0
        """Proposed tokens that targets have verified."""
        self.served = 0
        """Of these, those that draft workers had proposed."""
        self.events: list[tuple[Any, ...]] = []
        self.failure: str | None = None
        self._failed = loop.create_future()
        self._all_ended: asyncio.Future[None] = loop.create_future()
        self._unended = len(plan.requests)
        self._worker_epochs = 0
        self._gateway_starts = 0
        self.cells = [CellSchedulers(self, number) for number in range(plan.cells)]
        self.workers: dict[str, SimulatedWorker] = {}
        self.gateways: list[SimulatedGateway] = []

    # What processes say.

    def note(self, *event: Any) -> None:
        """For the record, which ends with the first broken rule."""
        if self.failure is None:
            self.events.append((self.loop.now, *event))

    def fail(self, text: str) -> None:
        """A rule is broken. The first counts."""
        if self.failure is None:
            self.note("BROKEN", text)
            self.failure = text
            self._failed.set_result(None)

    @property
    def undisturbed(self) -> bool:
        """Whether nothing has happened yet to schedulers and connections."""
        return not self.faults.struck.keys() & DISTURBING

    def may_lose_workers(self, role: Role) -> bool:
        """Whether something has happened that can break the link of a worker of that role."""
        return bool(self.faults.struck.keys() - (HARMLESS_TO_TARGETS if role is Role.TARGET else HARMLESS_TO_LINKS))

    @property
    def links_are_well(self) -> bool:
        """Whether nothing has happened yet that strikes targets which it does not pick."""
        return not self.faults.struck.keys() - HARMLESS_TO_OTHERS

    @property
    def healthy(self) -> set[str]:
        """Workers that no fault has slowed or stalled, and that compute nothing of long ago."""
        now = self.loop.now
        return {
            worker_id
            for worker_id, worker in self.workers.items()
            if worker.slowness == 1.0 and worker.stalled_until < now and worker.computing_until < now + _LONGEST_STEP
        }

    def may_lose(self, prompt: tuple[int, ...]) -> bool:
        """Whether the same, and not only to others, can have happened to the worker of this prompt, while it was alone
        there."""
        return prompt in self.faults.poisons.prompts or bool(
            self.faults.struck.keys() - HARMLESS_TO_TARGETS - {POISON, "reset", "worker leaves"}
        )

    @property
    def current(self) -> list[SimulatedScheduler]:
        """The scheduler of each cell that has one, dead or alive."""
        return [cell.current for cell in self.cells if cell.current is not None]

    # The course of things.

    async def run(self) -> None:
        loop, plan = self.loop, self.plan
        for worker in plan.workers:
            self.start_worker(worker)
        for cell in self.cells:
            cell.start_scheduler()
        self.gateways = [SimulatedGateway(self, f"gateway{index}") for index in range(plan.gateways)]
        for request in plan.requests:
            loop.call_at(request.arrival, self._begin, request)
        for fault in plan.faults:
            loop.call_at(fault.time, self.faults.strike, fault)
        loop.call_at(plan.horizon, self.faults.mend)
        watching = loop.create_task(self._watch_progress())
        await asyncio.wait(
            [self._failed, self._all_ended], timeout=plan.horizon + MOST_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if self.failure is None and not self._all_ended.done():
            open_ones = [call.plan.number for call in self.calls if call.outcome is None]
            self.fail(f"requests {open_ones[:20]} have not ended")
        await self._settle()
        watching.cancel()

    async def _watch_progress(self) -> None:
        """Whatever becomes of draft workers and other targets, targets go on."""
        while self.links_are_well:
            for scheduler in self.current:
                scheduler.watched.check_progress(self.loop.now, self.healthy)
            await asyncio.sleep(0.05)

    async def _settle(self) -> None:
        limit = max(self.loop.now, self.plan.horizon) + MOST_IDLE_SECONDS
        while self.failure is None:
            if self.network.handler_errors:
                self.fail(f"a handler failed: {self.network.handler_errors[0]}")
                return
            left = self._left()
            if self.loop.now > limit:
                self.fail(f"left over: {left}")
            if self.loop.now > limit or (not left and self.loop.now >= self.plan.horizon):
                break
            await asyncio.sleep(0.25)
        if self.auditor is not None:
            self.auditor.check_end(worker.process for worker in self.workers.values())

    def _left(self) -> list[str]:
        """What is not as it was before the first request."""
        problems: list[str | None] = []
        up = {worker_id for scheduler in self.current for worker_id in scheduler.service.workers.up}
        problems += [f"{worker_id} is not in use" for worker_id in self.workers if worker_id not in up]
        problems += [worker.check_idle() for worker in self.workers.values()]
        problems += [scheduler.check_idle() for scheduler in self.current]
        for gateway in self.gateways:
            if gateway.client.streams:
                problems.append(f"{gateway.process.name} has {len(gateway.client.streams)} live streams")
        return [problem for problem in problems if problem]

    async def end(self) -> None:
        """Every task comes to its end, so that none outlives the loop."""
        processes = self.network.processes
        for process in processes:
            process.kill()
        self.network.threads.end()
        for _ in range(20):
            if not any(process.busy for process in processes):
                return
            await asyncio.sleep(0)
        raise RuntimeError(f"seed {self.plan.seed}: tasks of dead processes live on")

    def _begin(self, request: Any) -> None:
        gateway = self.gateways[request.gateway]
        if gateway.process.alive:
            gateway.begin(request)
        else:
            self.count_end()

    def count_end(self) -> None:
        """Of a request."""
        self._unended -= 1
        if not self._unended:
            self._all_ended.set_result(None)

    def start_worker(self, plan: WorkerPlan) -> None:
        self._worker_epochs += 1
        self.note("worker starts", plan.worker_id)
        kind = SimulatedTarget if plan.role is Role.TARGET else SimulatedDraft
        self.workers[plan.worker_id] = kind(self, plan, self._worker_epochs)

    def add_draft(self, cell: CellSchedulers, fault: Fault) -> None:
        """One more draft worker in a cell that has some."""
        drafts = [worker.plan for worker in self.workers.values() if worker.plan.role is Role.DRAFT]
        drafts = [plan for plan in drafts if plan.cell == cell.number]
        if drafts:
            self.start_worker(replace(drafts[0], worker_id=f"{drafts[0].worker_id}.{len(self.workers)}"))

    def others(self) -> list[Process]:
        """All but schedulers."""
        return [*(w.process for w in self.workers.values()), *(g.process for g in self.gateways)]

    def stop_worker(self, worker: SimulatedWorker, seconds: float) -> None:
        if worker.process.alive:
            self.note("worker dies", worker.plan.worker_id)
            worker.process.kill()
            self.loop.call_later(seconds, self.start_worker, worker.plan)

    def crash_cell(self, cell: CellSchedulers, seconds: float) -> None:
        """The scheduler and all workers at once."""
        if cell.current is not None:
            cell.crash(cell.current, seconds)
        for worker in list(self.workers.values()):
            if worker.plan.cell == cell.number:
                self.stop_worker(worker, seconds)

    def crash_gateway(self, index: int) -> None:
        gateway = self.gateways[index]
        self.note("gateway dies", gateway.process.name)
        gateway.process.kill()
        self._gateway_starts += 1
        self.gateways[index] = SimulatedGateway(self, f"gateway{index}.{self._gateway_starts}")
