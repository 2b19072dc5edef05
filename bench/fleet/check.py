"""The fluid of one small cell, beside the scheduler's core event by event, under the same steps of load."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.fleet.cells import Cells, Lengths
from bench.fleet.speeds import ACCEPTANCE, Floats, Hardware, Speeds, config
from deploy.planning.open_loop import OpenLoop, join_all
from deploy.planning.traffic import PlannedRequest
from deploy.planning.virtual_cell import PAGE_SIZE

_STEP = 0.05
_OUTPUT_LIMIT = 8000


@dataclass(frozen=True, slots=True)
class Phase:
    """So many seconds with so many requests a second for each target."""

    seconds: float
    rate: float


@dataclass(frozen=True, slots=True)
class Compared:
    """Of one phase without its first third: sequences in the cell, tokens committed a second, and seconds to the first
    token on average; `events` says of each what the core made of it, `fluid` what the fluid did."""

    rate: float
    events: dict[str, float]
    fluid: dict[str, float]

    @property
    def error(self) -> dict[str, float]:
        """Fluid over events, less one."""
        return {name: self.fluid[name] / self.events[name] - 1.0 for name in self.events}


def requests_of(phases: Sequence[Phase], targets: int, lengths: Lengths, seed: int) -> list[PlannedRequest]:
    """Poisson arrivals, prompts all of the mean length, exponential answers."""
    rng = random.Random(seed)
    requests, begin = [], 0.0
    for phase in phases:
        now = begin
        while (now := now + rng.expovariate(phase.rate * targets)) < begin + phase.seconds:
            output = min(_OUTPUT_LIMIT, max(1, round(rng.expovariate(1 / lengths.output))))
            requests.append(PlannedRequest(now, round(lengths.prompt), output))
        begin += phase.seconds
    return requests


def compare(
    hardware: Hardware, speeds: Speeds, lengths: Lengths, phases: Sequence[Phase], targets: int, seed: int = 0
) -> list[Compared]:
    """For each phase. The fluid gets the very arrivals of the core."""
    requests = requests_of(phases, targets, lengths, seed)
    cell = OpenLoop(config(targets), hardware.costs, lambda _id, _position: ACCEPTANCE, requests)
    join_all(cell, targets, 1, hardware.target.kv_tokens // PAGE_SIZE, hardware.draft.kv_tokens // PAGE_SIZE)
    cell.run_all()
    ends = np.cumsum([phase.seconds for phase in phases])
    inside, committed, first = fluid_of(requests, speeds, lengths, targets, float(ends[-1]))
    found = []
    for phase, end in zip(phases, ends, strict=True):
        begin = float(end) - phase.seconds * 2 / 3
        counted = [one for one in cell.times if begin <= one.arrival < end]
        times = np.arange(begin, float(end), _STEP)
        arrivals = np.sort([one.arrival for one in cell.times])
        lasts = np.sort([one.last for one in cell.times])
        there = np.searchsorted(arrivals, times) - np.searchsorted(lasts, times)
        events = {
            "sequences": float(there.mean()),
            "tokens/s": _tokens_between(cell, begin, float(end)) / (float(end) - begin),
            "first token": float(np.mean([one.first_token_seconds for one in counted])),
        }
        part = slice(round(begin / _STEP), round(float(end) / _STEP))
        fluid = {
            "sequences": float(inside[part].mean()),
            "tokens/s": float(committed[part].sum()) / (float(end) - begin),
            "first token": float(first[part].mean()),
        }
        found.append(Compared(phase.rate, events, fluid))
    return found


def _tokens_between(cell: OpenLoop, begin: float, end: float) -> float:
    """A request's tokens come evenly from its first to its last."""
    total = 0.0
    for one in cell.times:
        whole = max(one.last - one.first, 1e-9)
        total += one.tokens * max(0.0, min(one.last, end) - max(one.first, begin)) / whole
    return total


def fluid_of(
    requests: Sequence[PlannedRequest], speeds: Speeds, lengths: Lengths, targets: int, seconds: float
) -> tuple[Floats, Floats, Floats]:
    """Sequences, tokens committed and seconds to the first token, step by step."""
    cells, up = Cells(1, speeds, lengths), np.array([float(targets)])
    steps = round(seconds / _STEP)
    arriving = np.bincount([int(one.arrival / _STEP) for one in requests], minlength=steps).astype(np.float64)
    inside, committed, first = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    for step in range(steps):
        coming = arriving[step : step + 1]
        cells.arrive(coming, coming * lengths.prompt)
        flow = cells.advance(up, _STEP)
        inside[step], committed[step] = cells.sequences[0], flow.committed[0]
        first[step] = flow.first_token[0]
    return inside, committed, first
