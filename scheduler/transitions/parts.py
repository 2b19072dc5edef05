"""What the parts of a core share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.config import SchedulerConfig
from scheduler.messages import Command
from scheduler.speculation.controller import Controller
from scheduler.state.fleet import Fleet
from scheduler.state.live_set import LiveSet
from scheduler.state.pending_kv_moves import KvMoves
from scheduler.statistics import Counters


@dataclass(frozen=True, slots=True)
class CoreParts:
    """One of each for a core. `emit` takes the commands that follow, and at most `max_per_target` sequences are placed
    on one target; None sets no limit."""

    config: SchedulerConfig
    live: LiveSet
    fleet: Fleet
    controller: Controller
    moves: KvMoves
    counters: Counters
    emit: Callable[[Command], None]
    max_per_target: int | None
