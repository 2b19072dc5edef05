"""What goes wrong in a simulated cell, and how it is mended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spool.engine.steps import RowOutcome
from spool.scheduler.messages import Role
from tests.sim.cell.plan import (
    CELL_CRASH,
    DRAFT_CHANGES,
    DRAFT_FAULTS,
    DRAFT_POISON,
    POISON,
    TRUNCATED,
    Fault,
)
from tests.sim.cell.poisons import Poisons
from tests.sim.cell.worker import SimulatedWorker
from tests.support.paged_model import AnyRow

if TYPE_CHECKING:
    from tests.sim.cell.scheduler import CellSchedulers
    from tests.sim.cell.world import World

CUTTING = {"partition", "reset", "delay", "scheduler freezes"}
"""Faults after which somebody may not hear what was said."""
HARMLESS_TO_LINKS = {"gateway crash", "lost kv", "row trouble", "worker slow"}
HARMLESS_TO_TARGETS = HARMLESS_TO_LINKS | {*DRAFT_FAULTS, DRAFT_POISON, DRAFT_CHANGES}
HARMLESS_TO_OTHERS = {*DRAFT_FAULTS, DRAFT_POISON, DRAFT_CHANGES, "worker stalls", "worker slow"}
"""Faults that stop none but the worker that they strike."""
DISTURBING = CUTTING | {CELL_CRASH, "scheduler crash", "two schedulers", TRUNCATED}

_MOST_LOST = 2
"""Times that the KV of one sequence is lost on one worker; the core gives up on it at six in a row."""


class Faults:
    """Strikes when it is told to. `struck` counts by kind."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.struck: Counter[str] = Counter()
        self._lost: Counter[tuple[str, int]] = Counter()
        self.poisons = Poisons(world)

    def strike(self, fault: Fault) -> None:
        """Does what the fault says to whom it picks, unless that one is down already."""
        self._world.note("fault", fault.kind, round(fault.seconds, 3), round(fault.pick, 3), round(fault.strength, 3))
        worker = self._pick(fault)
        cell = self._cell(fault)
        scheduler = cell.current
        self.struck[fault.kind] += 1
        match fault.kind:
            case "scheduler crash" if scheduler is not None and scheduler.process.alive:
                cell.crash(scheduler, fault.seconds)
            case kind if kind == CELL_CRASH:
                self._world.crash_cell(cell, fault.seconds)
            case "scheduler freezes" if scheduler is not None and scheduler.process.alive:
                for other in self._world.others():
                    self._world.network.block(scheduler.process.name, other.name, fault.seconds)
                if fault.strength < 0.7:
                    cell.add_scheduler(scheduler, fault.seconds)
            case "two schedulers" if scheduler is not None and scheduler.process.alive:
                cell.old_name = (scheduler.address, self._world.loop.now + fault.seconds)
                cell.add_scheduler(scheduler, fault.seconds + fault.strength)
            case kind if kind in (POISON, DRAFT_POISON):
                self.poisons.prompts[self._world.plan.victim(fault).prompt] = fault
            case "draft joins":
                self._world.add_draft(cell, fault)
            case "proposals corrupted":
                self._world.network.corrupt_proposals(fault.seconds, 0.3 * fault.strength)
            case "gateway crash":
                self._world.crash_gateway(int(fault.pick * len(self._world.gateways)))
            case kind if kind == TRUNCATED:
                self._world.network.truncate(fault.seconds, 0.05 * fault.strength)
            case "partition" | "reset" | "delay" | "duplicate and reorder":
                self._disturb(fault)
            case _ if worker is not None:
                self._strike_worker(worker, fault)

    def _pick(self, fault: Fault) -> SimulatedWorker | None:
        """One of the workers; of the draft workers, for what strikes only these."""
        workers = [
            worker
            for worker in self._world.workers.values()
            if worker.process.alive
            and not worker.leaving
            and (fault.kind not in DRAFT_FAULTS or worker.plan.role is Role.DRAFT)
        ]
        return workers[int(fault.pick * len(workers))] if workers else None

    def _strike_worker(self, worker: SimulatedWorker, fault: Fault) -> None:
        network = self._world.network
        match fault.kind:
            case "worker crash" | "draft crash":
                self._world.stop_worker(worker, fault.seconds)
            case "worker leaves" | "kv damaged" | "draft leaves":
                if fault.kind == "kv damaged":
                    network.damage_kv(fault.seconds, fault.strength)
                leaving = worker.process.spawn(worker.leave(2 * fault.seconds))
                leaving.add_done_callback(lambda _: self._world.stop_worker(worker, fault.strength))
            case "worker drains" | "draft drains":
                # Nobody has told the scheduler.
                draining = worker.process.spawn(worker.server.drain(fault.seconds))
                draining.add_done_callback(lambda _: self._world.stop_worker(worker, fault.strength))
            case "worker stalls" | "draft hangs":
                worker.stalled_until = self._world.loop.now + fault.seconds
            case kind if kind == DRAFT_CHANGES:
                worker.change_acceptance(fault.strength)
            case "worker slow" | "draft slow":
                worker.slowness = 1.0 + 10.0 * fault.strength
            case "lost kv":
                worker.lose_kv(1 + int(fault.strength * 20))
            case "row trouble" | "draft refuses":
                self._trouble(worker, self._world.loop.now + fault.seconds, 0.05 * fault.strength)
            case "draft freezes":
                # Nobody hears it, not even the scheduler.
                for other in self._world.network.processes:
                    network.block(worker.process.name, other.name, fault.seconds)
            case "proposals disturbed":
                network.meddle("Propose", worker.process.name, fault.seconds, 0.3 * fault.strength)
            case "draft link breaks" | "draft link one way" | "draft link slow":
                self._strike_link(worker, fault)

    def _strike_link(self, draft: SimulatedWorker, fault: Fault) -> None:
        """Between a draft worker and one of the targets of its cell."""
        network, name = self._world.network, draft.process.name
        targets = [
            worker.process
            for worker in self._world.workers.values()
            if worker.plan.role is Role.TARGET and worker.plan.cell == draft.plan.cell
        ]
        target = targets[int(1000 * fault.pick) % len(targets)]
        self._world.note("between", name, target.name)
        match fault.kind:
            case "draft link breaks":
                network.cut(draft.process, target)
                network.block(name, target.name, fault.seconds * (fault.strength < 0.5))
            case "draft link one way":
                ends = (name, target.name) if fault.strength < 0.5 else (target.name, name)
                network.block_one_way(*ends, fault.seconds)
            case "draft link slow":
                network.slow_down(name, target.name, fault.seconds, 0.2 * fault.strength)

    def _cell(self, fault: Fault) -> CellSchedulers:
        """The one that it strikes, whatever it picks there."""
        cells = self._world.cells
        return cells[int(1000 * fault.time) % len(cells)]

    def _disturb(self, fault: Fault) -> None:
        """Between the scheduler and one of those it has to do with."""
        current = self._cell(fault).current
        if current is None:
            return
        scheduler = current.process
        others = self._world.others()
        other = others[int(fault.pick * len(others))]
        self._world.note("between", scheduler.name, other.name)
        match fault.kind:
            case "partition":
                self._world.network.block(scheduler.name, other.name, fault.seconds)
                if fault.strength < 0.5:
                    self._world.loop.call_later(fault.seconds, self._world.network.cut, scheduler, other)
            case "reset":
                self._world.network.cut(scheduler, other)
            case "delay":
                self._world.network.slow_down(scheduler.name, other.name, fault.seconds, fault.strength)
            case "duplicate and reorder":
                self._world.network.meddle("Steps", other.name, fault.seconds, 0.1 * fault.strength)

    def may_lose_kv(self, worker: SimulatedWorker, sequence_id: int) -> bool:
        """Counts it."""
        key = (worker.plan.worker_id, sequence_id)
        may = self._lost[key] < _MOST_LOST
        if may:
            self._lost[key] += 1
            self._world.note("kv lost", *key)
        return may

    def _trouble(self, worker: SimulatedWorker, until: float, chance: float) -> None:
        rng = self._world.rng

        def trouble(rows: Sequence[AnyRow]) -> dict[int, RowOutcome]:
            wrong: dict[int, RowOutcome] = {}
            if self._world.loop.now > until:
                return wrong
            if rng.random() < 0.1 * chance:
                raise RuntimeError("injected: the step failed")
            for place in range(len(rows)):
                if rng.random() < chance:
                    if rng.random() < 0.5:
                        wrong[place] = RowOutcome([], error="injected: a logit is not a number")
                    else:
                        wrong[place] = RowOutcome([], error="injected: no page is free", out_of_pages=True)
            return wrong

        worker.model.trouble = trouble

    def mend(self) -> None:
        """From here on nothing goes wrong."""
        self._world.note("mended")
        self.poisons.mend()
        self._world.network.heal()
        for cell in self._world.cells:
            cell.kill_old_ones()
        for worker in self._world.workers.values():
            worker.slowness = 1.0
            worker.stalled_until = 0.0
            worker.model.trouble = None
