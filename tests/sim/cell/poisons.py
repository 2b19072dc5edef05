"""Requests that kill the workers that compute them, and how many each of them may kill."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spool.scheduler.messages import Role, SequenceRequest
from tests.sim.cell.plan import DRAFT_POISON, POISON, Fault

if TYPE_CHECKING:
    from tests.sim.cell.process import Process
    from tests.sim.cell.worker import SimulatedWorker
    from tests.sim.cell.world import World

Prompt = tuple[int, ...]

MAX_KILLS = 2
"""Workers of a role that a sequence may take with it, for each time that it was submitted."""


@dataclass(frozen=True, slots=True)
class _Victim:
    worker: SimulatedWorker
    arrived: float
    """When: the step that it did not survive."""

    @property
    def excused(self) -> bool:
        """Whether the loss has a reason of its own: the worker leaves, drains, or its connection was cut meanwhile."""
        worker = self.worker
        return worker.leaving or worker.draining or worker.process.broken_until >= self.arrived


class Poisons:
    """`prompts` are those of poisons, with the fault that says for how long what they kill stays down."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.prompts: dict[Prompt, Fault] = {}
        self._submissions: Counter[Prompt] = Counter()
        """How often each prompt was submitted to a scheduler that could not know what it did before."""
        self._mended = False
        plan = world.plan
        poisons = (fault for fault in plan.faults if fault.kind in (POISON, DRAFT_POISON))
        self._homes: dict[Prompt, set[tuple[Process, int]]] = {plan.victim(fault).prompt: set() for fault in poisons}
        """Targets, and epochs of their schedulers, that have computed what is a poison or will be, by the prompt."""
        self._victims: dict[tuple[Prompt, Role], list[_Victim]] = defaultdict(list)

    def submitted(self, request: SequenceRequest) -> None:
        """Another scheduler says whom it suspects, unless it died before it could."""
        again = request.admitted_before or request.committed_output
        if not again or not self._world.undisturbed:
            self._submissions[request.prompt] += 1

    def mend(self) -> None:
        """From here on they kill nobody."""
        self._mended = True

    def computed(self, worker: SimulatedWorker, prompts: Iterable[Prompt]) -> None:
        """The worker computes rows of these."""
        role = worker.plan.role
        for prompt in sorted(set(prompts) & self._homes.keys()):
            homes = self._homes[prompt]
            if role is Role.TARGET:
                homes.add((worker.process, worker.server.highest_epoch))
            fault = self.prompts.get(prompt)
            if fault is None or self._mended or (role is Role.TARGET and fault.kind == DRAFT_POISON):
                continue
            victims = self._victims[prompt, role]
            victims.append(_Victim(worker, worker.arrived))
            kills, most = sum(not one.excused for one in victims), MAX_KILLS * self._submissions[prompt]
            if role is Role.DRAFT:
                # Each target must find out for itself.
                most *= len(homes)
            if kills > most:
                self._world.fail(f"{prompt} has killed {kills} {worker.plan.role.value} workers, {most} may go")
            self._world.loop.call_soon(self._world.stop_worker, worker, fault.seconds)
