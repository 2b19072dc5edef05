"""What breaks on a day, drawn beforehand: nodes, schedulers, and one zone as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GPU_FAULTS_PER_HOUR = 419 / (54 * 24 * 16_384)
"""For each GPU: 419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, arXiv 2407.21783).
Each is taken to cost its whole node."""
REPAIR_SECONDS = 4 * 3600.0
"""Assumed: until a node is back."""
SCHEDULER_FAULTS_PER_HOUR = 1 / (7 * 24)
"""Assumed: each scheduler once a week."""
SCHEDULER_SECONDS = 20.0
"""Assumed: until another scheduler has the cell's workers."""


@dataclass(frozen=True, slots=True)
class NodeFault:
    """A node of a cell leaves with all its GPUs."""

    time: float
    cell: int
    node: int


@dataclass(frozen=True, slots=True)
class SchedulerFault:
    time: float
    cell: int


@dataclass(frozen=True, slots=True)
class ZoneLoss:
    """All cells of a zone are gone from `time` on for so many seconds."""

    zone: int
    time: float
    seconds: float

    @property
    def end(self) -> float:
        return self.time + self.seconds


Fault = NodeFault | SchedulerFault


def draw(rng: np.random.Generator, cells: int, nodes: int, gpus_per_node: int, seconds: float) -> list[Fault]:
    """In the order of their times: Poisson processes, for cells of so many nodes."""
    hours = seconds / 3600
    found: list[Fault] = []
    for _ in range(rng.poisson(GPU_FAULTS_PER_HOUR * cells * nodes * gpus_per_node * hours)):
        found.append(NodeFault(rng.uniform(0, seconds), int(rng.integers(cells)), int(rng.integers(nodes))))
    for _ in range(rng.poisson(SCHEDULER_FAULTS_PER_HOUR * cells * hours)):
        found.append(SchedulerFault(rng.uniform(0, seconds), int(rng.integers(cells))))
    return sorted(found, key=lambda fault: fault.time)
