"""Requests that take the workers with them that compute them, and how many each of them may take."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.messages import Role, SequenceRequest
from tests.sim.cell.plan import HANGING, SPORADIC, Fault
from tests.sim.cell.virtual_time import NeverEndsError

if TYPE_CHECKING:
    from tests.sim.cell.worker import SimulatedWorker
    from tests.sim.cell.world import World

Prompt = tuple[int, ...]

MAX_KILLS = 2
"""Workers of a role that a sequence may take with it."""
_SPORADIC_CHANCE = 1 / 3
_SHORTEST_HANG, _LONGEST_HANG, _LONGEST_DOWN = 0.5, 2.5, 1.0
"""Seconds until a worker that hangs is restarted, some before and some after its scheduler gives it up, and down."""
_MOST_HANGING = 3
"""Requests. A cell with one target stands still for twice these seconds for each, and everything must end in time."""


@dataclass(frozen=True, slots=True)
class _Victim:
    worker: SimulatedWorker
    arrived: float
    """When: the step that it did not survive."""

    @property
    def excused(self) -> bool:
        """Whether the loss has a reason of its own: the worker leaves, drains, or its connection was cut meanwhile."""
        worker = self.worker
        return worker.leaving or worker.executor.draining or worker.process.broken_until >= self.arrived


class Poisons:
    """`prompts` are those of poisons, with the fault that says what each does: kill, hang, or kill now and then."""

    def __init__(self, world: World) -> None:
        self._world = world
        # From a generator of its own: cells without such a poison take the course that they took before.
        self._rng = random.Random(f"sporadic poisons of {world.plan.seed}")
        self.prompts: dict[Prompt, Fault] = {}
        self.submissions: Counter[Prompt] = Counter()
        """How often each prompt was submitted to a scheduler that could not know what it did before."""
        self._mended = False
        self._victims: dict[tuple[Prompt, Role], list[_Victim]] = defaultdict(list)

    def add(self, prompt: Prompt, fault: Fault) -> None:
        if prompt in self.prompts and self.prompts[prompt].kind != fault.kind:
            return  # how many workers it may take is the matter of one kind
        hanging = {known for known, poison in self.prompts.items() if poison.kind == HANGING} | {prompt}
        requests = sum(one.request.prompt in hanging for one in self._world.plan.requests)
        if fault.kind != HANGING or requests <= _MOST_HANGING:
            self.prompts[prompt] = fault

    def submitted(self, request: SequenceRequest) -> None:
        """Another scheduler says whom it suspects, unless it died before it could."""
        again = request.admitted_before or request.committed_output
        if not again or not self._world.undisturbed:
            self.submissions[request.prompt] += 1

    def mend(self) -> None:
        """Requests that always kill do so no more. The others need longer than all else that goes wrong: they go on."""
        self._mended = True

    def computed(self, worker: SimulatedWorker, arrived: float, prompts: set[Prompt]) -> None:
        """The worker has computed rows of these, in a step that arrived then. Raises NeverEndsError where it hangs."""
        poisons = [(prompt, self.prompts[prompt]) for prompt in sorted(prompts & self.prompts.keys())]
        struck = [(prompt, fault) for prompt, fault in poisons if self._strikes(fault)]
        for prompt, fault in struck:
            self._count(_Victim(worker, arrived), prompt, fault)
            if fault.kind != HANGING:
                self._world.loop.call_soon(self._world.stop_worker, worker, fault.seconds)
        hanging = [fault for _, fault in struck if fault.kind == HANGING]
        if hanging:
            self._world.note("worker hangs", worker.plan.worker_id)
            seconds = _SHORTEST_HANG + hanging[0].strength * (_LONGEST_HANG - _SHORTEST_HANG)
            down = min(hanging[0].seconds, _LONGEST_DOWN)
            self._world.loop.call_later(seconds, self._world.stop_worker, worker, down)
            raise NeverEndsError

    def _strikes(self, fault: Fault) -> bool:
        if fault.kind == SPORADIC:
            return self._rng.random() < _SPORADIC_CHANCE
        return fault.kind == HANGING or not self._mended

    def _count(self, victim: _Victim, prompt: Prompt, fault: Fault) -> None:
        role = victim.worker.plan.role
        victims = self._victims[prompt, role]
        victims.append(victim)
        kills = sum(not one.excused for one in victims)
        most = self._most_kills(prompt, fault) * self.submissions[prompt]
        if kills > most:
            self._world.fail(f"{prompt} has killed {kills} {role.value} workers, {most} may go")

    def _most_kills(self, prompt: Prompt, fault: Fault) -> int:
        """For each submission. A sequence that makes progress is no suspect any more: a token, or a proposal, clears it
        the first time, twice as many each time after that (scheduler/transitions/blame.py).
        """
        if fault.kind != SPORADIC:
            return MAX_KILLS
        longest = max(len(call.expected) for call in self._world.calls if call.plan.request.prompt == prompt)
        return MAX_KILLS + (longest + 1).bit_length() - 1
