"""The cheapest fleet that keeps a service level, by simulating one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from deploy.planning.hardware import ReplicaKind
from deploy.planning.open_loop import LoadFigures, OpenLoop, figures, join_all
from deploy.planning.plan_file import PlanFile
from deploy.planning.traffic import PlannedRequest
from deploy.planning.virtual_cell import PAGE_SIZE, Costs

_JITTER = 0.02
"""Relative spread of step times."""

Say = Callable[[str], None]


class System(Enum):
    """How requests are decoded."""

    PLAIN = "plain"
    """One token a step, without drafts."""
    APART = "drafts apart"
    """Targets and drafts on devices of their own, under one scheduler."""
    COLOCATED = "drafts colocated"
    """As other servers do it: each target has a draft on its own device, in turns with it, and a scheduler of its own.
    Requests are dealt out to them in turn."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Targets and drafts, each all of one kind. `drafts` counts those on devices of their own."""

    system: System
    target: ReplicaKind
    draft: ReplicaKind
    targets: int
    drafts: int = 0

    @property
    def workers(self) -> str:
        """In words."""
        targets = f"{self.targets} target{'s' * (self.targets > 1)} on {self.target.name}"
        drafts = f" and {self.drafts} draft{'s' * (self.drafts > 1)} on {self.draft.name}" if self.drafts else ""
        return targets + drafts

    @property
    def schedulers(self) -> int:
        """Cells that share nothing."""
        return self.targets if self.system is System.COLOCATED else 1

    @property
    def price(self) -> float:
        """Of all devices, for an hour."""
        return self.targets * self.target.price + self.drafts * self.draft.price


@dataclass(frozen=True, slots=True)
class Planned:
    """A fleet and what it makes of the traffic."""

    fleet: Fleet
    figures: LoadFigures

    @property
    def price_per_million(self) -> float:
        """Of a million output tokens at this traffic."""
        return self.fleet.price / 3600 / max(self.figures.tokens_per_second, 1e-9) * 1e6


def simulate(plan: PlanFile, requests: Sequence[PlannedRequest], fleet: Fleet) -> LoadFigures:
    """What the fleet makes of these requests."""
    scheduling, target, draft = plan.scheduling, fleet.target, fleet.draft
    colocated = fleet.system is System.COLOCATED
    costs = Costs(
        base=target.step,
        row=target.token,
        draft_base=draft.step,
        draft_row=draft.token,
        latency=0.0 if colocated else scheduling.wire_seconds,
        jitter=_JITTER,
        row_alone=target.token if colocated else None,
        kv=target.kv_token,
        draft_kv=draft.kv_token,
        block=target.block_tokens,
        draft_block=draft.block_tokens,
        scheduler_step=scheduling.step_seconds,
        scheduler_row=scheduling.row_seconds,
    )
    pages = target.kv_tokens // PAGE_SIZE, draft.kv_tokens // PAGE_SIZE
    cells = []
    for part in range(fleet.schedulers):
        config = scheduling.config(fleet.system is not System.PLAIN)
        own = requests[part :: fleet.schedulers]
        cell = OpenLoop(config, costs, lambda _id, _position: plan.acceptance, own, scheduling.gateway_seconds, part)
        join_all(cell, fleet.targets // fleet.schedulers, 1 if colocated else fleet.drafts, *pages)
        cell.run_all()
        cells.append(cell)
    return figures(cells, [plan.service.percentile])


class Search:
    """Looks for the cheapest fleet of each system. `say` is told of every fleet that was tried."""

    def __init__(self, plan: PlanFile, requests: Sequence[PlannedRequest], say: Say) -> None:
        self._plan = plan
        self._requests = requests
        self._say = say
        self._tried: dict[Fleet, LoadFigures] = {}

    def cheapest(self, system: System) -> Planned | None:
        """None where none of up to `max_targets` targets is enough."""
        best: Planned | None = None
        for target, draft in self._kinds(system):
            for fleet in self._enough(system, target, draft, best.fleet.price if best else None):
                if best is None or fleet.price < best.fleet.price:
                    best = Planned(fleet, self._tried[fleet])
        return best

    def _kinds(self, system: System) -> Iterator[tuple[ReplicaKind, ReplicaKind]]:
        targets, drafts = self._plan.kinds(self._plan.target), self._plan.kinds(self._plan.draft)
        for target in targets:
            if system is System.APART:
                yield from ((target, draft) for draft in drafts)
            elif system is System.PLAIN:
                yield target, drafts[0]
            else:
                # The draft computes on the target's device, if its costs there are known.
                yield from ((target, draft) for draft in drafts if draft.name == target.name)

    def _enough(self, system: System, target: ReplicaKind, draft: ReplicaKind, price: float | None) -> Iterator[Fleet]:
        """Fleets of these kinds that keep the service level: of each number of targets from the least on, that with the
        fewest drafts, as long as it may be cheaper than `price`."""

        def fleet(targets: int, drafts: int) -> Fleet:
            return Fleet(system, target, draft, targets, drafts if system is System.APART else 0)

        def keeps(targets: int, drafts: int) -> bool:
            return self._keeps(fleet(targets, drafts))

        least = _least(1, self._plan.max_targets, lambda number: keeps(number, number))
        if least is None:
            return
        if system is not System.APART:
            yield fleet(least, 0)
            return
        best = fleet(least, least).price if price is None else price
        for targets in range(least, self._plan.max_targets + 1):
            if fleet(targets, 1).price > best:
                return
            drafts = _least(1, targets, partial(keeps, targets))
            if drafts is not None:
                yield fleet(targets, drafts)
                best = min(best, fleet(targets, drafts).price)

    def _keeps(self, fleet: Fleet) -> bool:
        if fleet not in self._tried:
            self._tried[fleet] = simulate(self._plan, self._requests, fleet)
            self._say(_described(fleet, self._tried[fleet]))
        service = self._plan.service
        return self._tried[fleet].keeps(service.first_token_seconds, service.token_seconds, service.percentile)


def _least(low: int, high: int, enough: Callable[[int], bool]) -> int | None:
    """The least number from `low` to `high` that is enough, if more are never worse: by doubling, then halving."""
    reach = low
    while not enough(reach):
        if reach == high:
            return None
        low, reach = reach + 1, min(high, 2 * reach)
    while low < reach:
        middle = (low + reach) // 2
        if enough(middle):
            reach = middle
        else:
            low = middle + 1
    return reach


def _described(fleet: Fleet, found: LoadFigures) -> str:
    return (
        f"{fleet.system.value}, {fleet.workers}: first token {found.first_token['p99']:.2f} s, "
        f"token {found.token['p99'] * 1000:.1f} ms (p99)"
    )
