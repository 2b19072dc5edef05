"""One day of a fleet, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.fleet.cells import Cells, Flow, Group, Lengths
from bench.fleet.demand import DAY_SECONDS, Demand
from bench.fleet.faults import REPAIR_SECONDS, SCHEDULER_SECONDS, Fault, NodeFault, ZoneLoss, draw
from bench.fleet.gateways import spread, weights
from bench.fleet.replicas import Replicas
from bench.fleet.samples import Samples
from bench.fleet.scaling import Scaling
from bench.fleet.speeds import PREFILL_CHUNK, TARGETS_PER_DRAFT, Floats, Speeds
from deploy.autoscaling.capacity import Goals
from deploy.autoscaling.decision import GroupRules, Rules

_READ_SECONDS = 5.0
_DECIDE_SECONDS = 15.0
_STAGGER_SECONDS = 900.0
_LOST_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Plan:
    """What is simulated. Times are seconds after midnight; a cell's nodes hold its targets and drafts evenly."""

    cells: int = 125
    zones: int = 3
    nodes: int = 10
    gpus_per_node: int = 8
    min_targets: int = 8
    start_seconds: float = 120.0
    token_seconds: float = 0.006
    step: float = 0.5
    seconds: float = DAY_SECONDS
    seed: int = 0
    zone_loss: ZoneLoss | None = field(default_factory=lambda: ZoneLoss(0, 20.5 * 3600, 1800.0))

    @property
    def gpus(self) -> int:
        return self.cells * self.nodes * self.gpus_per_node

    @property
    def targets(self) -> int:
        """That a cell has GPUs for, beside their share of drafts."""
        return self.nodes * self.gpus_per_node * TARGETS_PER_DRAFT // (TARGETS_PER_DRAFT + 1)

    @property
    def rules(self) -> Rules:
        group = GroupRules(min_replicas=self.min_targets, max_replicas=self.targets)
        return Rules(target=group, goals=Goals(token_seconds=self.token_seconds))

    def zone(self, cell: int) -> int:
        return cell % self.zones

    def targets_of_node(self, node: int) -> int:
        """All nodes together have `targets` of them."""
        return self.targets * (node + 1) // self.nodes - self.targets * node // self.nodes


@dataclass(slots=True)
class Totals:
    """Of the day. GPU-hours count replicas that are up or start, with their drafts."""

    arrived: float = 0.0
    finished: float = 0.0
    committed_tokens: float = 0.0
    prefilled_tokens: float = 0.0
    recomputed_tokens: float = 0.0
    resubmitted: float = 0.0
    zone_resubmitted: float = 0.0
    gpu_hours: float = 0.0
    node_faults: int = 0
    scheduler_faults: int = 0
    decisions: int = 0
    peak_targets: float = 0.0
    """Up at a time, before the zone was lost."""
    peak_rows_per_cell: float = 0.0
    """Row decisions a second of the busiest cell."""


class Day:
    """`run` plays the day. `open` at the end are sequences that have not finished: none is ever lost."""

    def __init__(self, plan: Plan, speeds: Speeds, demand: Demand, lengths: Lengths, kv_tokens: int) -> None:
        self.plan = plan
        self.totals = Totals()
        self.day = Samples(300.0, 0.0, plan.seconds)
        loss = plan.zone_loss
        self.close_up = Samples(30.0, loss.time - 900.0, loss.end + 1800.0) if loss else Samples(30.0, 0.0, 0.0)
        self.cells = Cells(plan.cells, speeds, lengths)
        self._speeds, self._demand, self._lengths = speeds, demand, lengths
        self._rng = np.random.default_rng(plan.seed)
        self._faults: list[Fault] = draw(self._rng, plan.cells, plan.nodes, plan.gpus_per_node, plan.seconds)
        self._replicas = Replicas(plan.cells, self._first_targets(), plan.targets, plan.start_seconds)
        self._scaling = Scaling(plan.cells, speeds, plan.rules, kv_tokens)
        # Schedulers did not all start at midnight, so they do not decide in step.
        self._decides_from = self._rng.uniform(0.0, _STAGGER_SECONDS, plan.cells)
        self._without_scheduler = np.zeros(plan.cells)
        """Until when."""
        self._lost_zone = np.array([loss is not None and plan.zone(cell) == loss.zone for cell in range(plan.cells)])
        self._zone_is_lost = False
        self._homeless = Group()
        self._recomputed = 0.0

    @property
    def open(self) -> float:
        return float(self.cells.sequences.sum()) + self._homeless.sequences

    def run(self, say: Callable[[float], None] = lambda _seconds: None) -> None:
        """`say` is told the simulated seconds now and then. Raises RuntimeError where a sequence is lost."""
        steps = round(self.plan.seconds / self.plan.step)
        each = round(_READ_SECONDS / self.plan.step)
        for number in range(1, steps + 1):
            now = number * self.plan.step
            self._break(now)
            self._replicas.come_up(now)
            self._step(now, number % each == 0)
            if number % each == 0:
                self._check(now)
                say(now)

    def _first_targets(self) -> int:
        """That the load at midnight needs."""
        per_target = self._speeds.request_rate(self.plan.token_seconds, self._lengths.prompt, self._lengths.output)
        wanted = math.ceil(self._demand.rate(0.0) / per_target / self.plan.cells / 0.75)
        return min(max(wanted, self.plan.min_targets), self.plan.targets)

    # --- faults -------------------------------------------------------------------------------------------------------

    def _break(self, now: float) -> None:
        while self._faults and self._faults[0].time <= now:
            fault = self._faults.pop(0)
            if self._zone_is_lost and self._lost_zone[fault.cell]:
                continue
            if isinstance(fault, NodeFault):
                self._lose_node(fault, now)
            else:
                self.totals.scheduler_faults += 1
                self._without_scheduler[fault.cell] = now + SCHEDULER_SECONDS
                self._scaling.forget(fault.cell)
                self._take_out([fault.cell])
        loss = self.plan.zone_loss
        if loss is not None and not self._zone_is_lost and loss.time <= now < loss.end:
            self._zone_is_lost = True
            cells: list[int] = np.flatnonzero(self._lost_zone).tolist()
            self.totals.zone_resubmitted += self._take_out(cells)
            for cell in cells:
                self._replicas.close(cell)
                self._scaling.forget(cell)
        elif loss is not None and self._zone_is_lost and now >= loss.end:
            self._zone_is_lost = False
            for cell in np.flatnonzero(self._lost_zone).tolist():
                self._replicas.open(cell, now)

    def _lose_node(self, fault: NodeFault, now: float) -> None:
        self.totals.node_faults += 1
        shares = np.zeros(self.plan.cells)
        places = self.plan.targets_of_node(fault.node)
        shares[fault.cell] = self._replicas.lose_node(fault.cell, places, now, now + REPAIR_SECONDS)
        self._recomputed += float(self.cells.lose_kv(shares).sum())

    def _take_out(self, cells: Sequence[int]) -> float:
        """All sequences of these cells look for another one. Answers how many there are."""
        shares = np.zeros(self.plan.cells)
        shares[list(cells)] = 1.0
        group = self.cells.release(shares)
        self._homeless.sequences += group.sequences
        self._homeless.tokens += group.tokens
        self._recomputed += group.lost
        self.totals.resubmitted += group.sequences
        return group.sequences

    # --- a step -------------------------------------------------------------------------------------------------------

    def _step(self, now: float, reads: bool) -> None:
        plan, totals, replicas = self.plan, self.totals, self._replicas
        serving = np.where(self._without_scheduler <= now, replicas.up, 0.0)
        arrivals = int(self._rng.poisson(self._demand.rate(now) * plan.step))
        arrived = self._arrive(arrivals, weights(self.cells.sequences, serving))
        flow = self.cells.advance(serving, plan.step)
        at = self.cells.decoding / np.maximum(serving, 1.0)
        self._scaling.count(arrived, flow, at)
        rows = self._rows(at, flow, serving)
        gpus = (float(replicas.up.sum()) + float(replicas.starting.sum())) * (1 + 1 / TARGETS_PER_DRAFT)
        totals.arrived += arrivals
        totals.finished += float(flow.finished.sum())
        totals.committed_tokens += float(flow.committed.sum())
        totals.prefilled_tokens += float(flow.prefilled.sum())
        totals.recomputed_tokens += self._recomputed
        totals.gpu_hours += gpus * plan.step / 3600
        totals.peak_rows_per_cell = max(totals.peak_rows_per_cell, float(rows.max()))
        if plan.zone_loss is None or now < plan.zone_loss.time:
            totals.peak_targets = max(totals.peak_targets, float(replicas.up.sum()))
        if reads:
            self._read_and_decide(serving, at, now)
        self._keep(now, arrivals, arrived, flow, serving, gpus)
        self._recomputed = 0.0

    def _arrive(self, arrivals: int, shares: Floats) -> Floats:
        """Where no cell serves, requests wait at the gateways."""
        homeless = self._homeless
        if not shares.any():
            homeless.sequences += arrivals
            homeless.tokens += arrivals * self._lengths.prompt
            return np.zeros(self.plan.cells)
        arrived = spread(self._rng, arrivals, shares)
        self.cells.arrive(
            arrived + homeless.sequences * shares, arrived * self._lengths.prompt + homeless.tokens * shares
        )
        self._homeless = Group()
        return arrived

    def _rows(self, at: Floats, flow: Flow, serving: Floats) -> Floats:
        """Row decisions a second: rounds of the targets, proposals of the drafts, and chunks of prompts on both."""
        rounds = self._speeds.of("rounds", at) + self._speeds.of("proposals", at)
        return rounds * serving + 2 * flow.prefilled / self.plan.step / PREFILL_CHUNK

    def _read_and_decide(self, serving: Floats, at: Floats, now: float) -> None:
        self._scaling.read(self.cells, serving, at, now)
        if now % _DECIDE_SECONDS:
            return
        for cell in range(self.plan.cells):
            lost = self._zone_is_lost and self._lost_zone[cell]
            if lost or max(self._without_scheduler[cell], self._decides_from[cell]) > now:
                continue
            asked = self._scaling.decide(cell, int(self._replicas.asked[cell]), now)
            self.totals.decisions += 1
            if asked != self._replicas.asked[cell]:
                self._replicas.ask(cell, asked, now)

    def _keep(self, now: float, arrivals: int, arrived: Floats, flow: Flow, serving: Floats, gpus: float) -> None:
        step, up = self.plan.step, float(self._replicas.up.sum())
        per_target = self._speeds.request_rate_limit(self._lengths.prompt, self._lengths.output)
        numbers = {
            "requests": arrivals / step,
            "demand": arrivals * self._lengths.output / step,
            "committed": float(flow.committed.sum()) / step,
            "capacity": float(serving.sum()) * per_target * self._lengths.output,
            "asked": float(self._replicas.asked_for.sum()),
            "up": up,
            "gpus": gpus,
            "waiting": float(self.cells.waiting.sum()) + self._homeless.sequences,
            "running": float(self.cells.running.sum()),
            "token_ms": 1000.0 * float(self.cells.decoding.sum()) / max(1e-9, float(flow.committed.sum()) / step),
            "recomputed": self._recomputed / step,
        }
        for samples in (self.day, self.close_up):
            samples.add(now, numbers, flow.first_token, arrived)

    def _check(self, now: float) -> None:
        totals = self.totals
        missing = totals.arrived - totals.finished - self.open
        if abs(missing) > _LOST_TOLERANCE * max(1.0, totals.arrived):
            raise RuntimeError(f"{missing:.6f} sequences are missing after {now:.0f} s")
