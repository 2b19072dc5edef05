"""The real autoscaling decision for every cell, fed by what its scheduler would read of the fluid."""

from __future__ import annotations

import numpy as np

from bench.fleet.cells import Cells, Flow
from bench.fleet.speeds import BATCH_SIZE, TARGETS_PER_DRAFT, Floats, Speeds
from deploy.autoscaling.decision import Past, Rules, decide
from deploy.autoscaling.recent import Reading, add_reading, figures_of

_TOTALS = ("arrived", "ended", "tokens", "deliveries", "drafted")


class Scaling:
    """One decision for each cell, which follows from its own past alone.

    Only targets are decided on. Drafts come and go with them, one for so many targets as the speeds were taken with.
    """

    def __init__(self, cells: int, speeds: Speeds, rules: Rules, kv_tokens: int) -> None:
        self._speeds = speeds
        self._rules = rules
        self._kv_tokens = kv_tokens
        self._totals = {name: np.zeros(cells) for name in _TOTALS}
        self._readings: list[tuple[Reading, ...]] = [()] * cells
        self._past = [Past() for _ in range(cells)]

    def count(self, arrived: Floats, flow: Flow, at: Floats) -> None:
        """What happened in a step; `at`: sequences that decode, for each target."""
        rounds = self._speeds.of("rounds", at)
        deliveries = flow.committed * np.where(rounds > 0, rounds / np.maximum(self._speeds.of("tokens", at), 1e-9), 1)
        drafted = deliveries * self._speeds.of("drafted", at) / np.maximum(rounds, 1e-9)
        for name, values in zip(_TOTALS, (arrived, flow.finished, flow.committed, deliveries, drafted), strict=True):
            self._totals[name] += values

    def read(self, cells: Cells, up: Floats, at: Floats, now: float) -> None:
        """A reading of each cell."""
        totals = {name: values.round().astype(np.int64).tolist() for name, values in self._totals.items()}
        laws = {
            name: self._speeds.of(name, at).tolist()
            for name in ("busy", "acceptance", "target_base", "target_row", "draft_pass", "draft_row")
        }
        decoding, running = cells.decoding.round().tolist(), cells.running.round().tolist()
        waiting, targets = cells.waiting.round().tolist(), up.astype(np.int64).tolist()
        room = (self._kv_tokens * cells.decoding / np.maximum(cells.context, 1.0)).tolist()
        for cell, readings in enumerate(self._readings):
            tokens, deliveries = totals["tokens"][cell], totals["deliveries"][cell]
            reading = Reading(
                time=now,
                arrived=totals["arrived"][cell],
                ended=totals["ended"][cell],
                tokens=tokens,
                deliveries=deliveries,
                drafted=totals["drafted"][cell],
                accepted=max(0, tokens - deliveries),
                decoding=int(decoding[cell]),
                running=int(running[cell]),
                waiting=int(waiting[cell]),
                targets=targets[cell],
                drafts=-(-targets[cell] // TARGETS_PER_DRAFT),
                target_busy=laws["busy"][cell],
                acceptance=laws["acceptance"][cell],
                target_base=laws["target_base"][cell],
                target_row=laws["target_row"][cell],
                draft_pass=laws["draft_pass"][cell],
                draft_row=laws["draft_row"][cell],
                room=room[cell] if decoding[cell] else float("nan"),
            )
            self._readings[cell] = add_reading(readings, reading)

    def decide(self, cell: int, asked: int, now: float) -> int:
        """How many targets the cell is to have; it had asked for so many. As `FollowScheduler` does it: the number
        stays where it is within what the scheduler allows."""
        # A longest draft of 0: what other draft lengths would save is not asked for.
        figures = figures_of(self._readings[cell], BATCH_SIZE, 0)
        decision, self._past[cell] = decide(figures, self._rules, self._past[cell], now)
        assert decision.target is not None
        return min(max(asked, decision.target.at_least), decision.target.at_most)

    def forget(self, cell: int) -> None:
        """The cell gets a new scheduler."""
        self._readings[cell] = ()
        self._past[cell] = Past()
