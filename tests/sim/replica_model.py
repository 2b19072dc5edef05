"""Two groups of replicas under a load in virtual time: what the autoscaling policy is judged by.

Sequences decode on targets in rounds whose seconds follow from costs of its own. New replicas take time to start, and
Serve's part (bounds, the policy's word) is played by a few lines. The policy sees counters, as from a scheduler.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from deploy.autoscaling.decision import Decision, GroupDecision, Past, Rules, decide
from deploy.autoscaling.recent import Reading, add_reading, figures_of

STEP = 0.25


@dataclass(frozen=True)
class Costs:
    """Seconds of steps. `overhead` is what a round takes beyond them, of which the policy is told nothing."""

    target_base: float = 0.020
    target_row: float = 0.0004
    draft_pass: float = 0.004
    draft_row: float = 0.0002
    overhead: float = 0.002
    batch_size: int = 16
    draft_length: int = 4
    pages: int = 64


@dataclass(frozen=True)
class Moment:
    """The cell at one time: replicas that are up, and what a token takes for a sequence that decodes."""

    time: float
    clients: int
    targets: int
    drafts: int
    waiting: int
    token_seconds: float


@dataclass
class Group:
    """Replicas that are up, and those that start, by when they will be up."""

    up: int
    starting: deque[float] = field(default_factory=deque)
    changes: list[tuple[float, int]] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.up + len(self.starting)

    def follow(self, decision: GroupDecision, now: float, start_seconds: float) -> None:
        wanted = min(max(self.number, decision.at_least), decision.at_most)
        if wanted != self.number:
            self.changes.append((now, wanted))
        while self.number < wanted:
            self.starting.append(now + start_seconds)
        while self.number > wanted:
            if self.starting:
                self.starting.pop()
            else:
                self.up -= 1

    def advance(self, now: float) -> None:
        while self.starting and self.starting[0] <= now:
            self.starting.popleft()
            self.up += 1


class Cell:
    """`clients(t)` ask one after the other, each for `tokens`; or `arrivals(t)` come a second, whoever waits."""

    def __init__(
        self,
        rules: Rules,
        costs: Costs,
        *,
        clients: Callable[[float], int] = lambda _: 0,
        arrivals: Callable[[float], float] = lambda _: 0.0,
        acceptance: Callable[[float], float] = lambda _: 0.7,
        tokens: int = 100,
        max_running: int = 256,
        start_seconds: float = 20.0,
    ) -> None:
        self.rules, self.costs, self.start_seconds, self.max_running = rules, costs, start_seconds, max_running
        self.clients, self.arrivals, self.acceptance, self.tokens = clients, arrivals, acceptance, tokens
        self.target, self.draft = Group(1), Group(1)
        self.moments: list[Moment] = []
        self.decisions: list[tuple[float, Decision]] = []
        self._left: list[float] = []
        self._waiting = 0
        self._due = 0.0
        self._counts = dict.fromkeys(("arrived", "ended", "tokens", "deliveries", "drafted", "accepted"), 0.0)
        self._past = Past()
        self._readings: tuple[Reading, ...] = ()

    def run(self, seconds: float) -> list[Moment]:
        time = 0.0
        while time < seconds:
            self._advance(time)
            if round(time / STEP) % 2 == 0:
                self._decide(time)
            time += STEP
        return self.moments

    def _advance(self, now: float) -> None:
        self.target.advance(now)
        self.draft.advance(now)
        self._due += self.arrivals(now) * STEP
        missing = self.clients(now) - len(self._left) - self._waiting
        coming = max(missing, 0) + int(self._due)
        self._due -= int(self._due)
        self._counts["arrived"] += coming
        self._waiting += coming
        room = min(self.max_running, self.target.up * self.costs.pages) - len(self._left)
        admitted = min(max(room, 0), self._waiting)
        self._waiting -= admitted
        self._left += [float(self.tokens)] * admitted
        seconds, commit = self._round(now)
        rounds = STEP / seconds
        done = rounds * commit
        count = len(self._left)
        self._counts["deliveries"] += rounds * count
        self._counts["tokens"] += done * count
        self._counts["drafted"] += rounds * count * self.costs.draft_length
        self._counts["accepted"] += rounds * count * (commit - 1)
        self._left = [left - done for left in self._left]
        ended = sum(left <= 0 for left in self._left)
        self._left = [left for left in self._left if left > 0]
        self._counts["ended"] += ended
        self.moments.append(
            Moment(now, self.clients(now), self.target.up, self.draft.up, self._waiting, seconds / commit)
        )

    def _round(self, now: float) -> tuple[float, float]:
        """Seconds of a round of every sequence, and the tokens that it yields."""
        costs, accept = self.costs, self.acceptance(now)
        each = max(len(self._left) / self.target.up, 1.0)
        gamma = costs.draft_length
        steps = math.ceil(each / costs.batch_size)
        verifying = steps * costs.target_base + costs.target_row * each * (gamma + 1)
        drafting = gamma * costs.draft_pass + costs.draft_row * gamma * max(len(self._left) / self.draft.up, 1.0)
        exclusive = costs.target_base + costs.target_row * min(each, costs.batch_size) * (gamma + 1)
        seconds = max(verifying, drafting + exclusive if steps == 1 else drafting) + costs.overhead
        return seconds, sum(accept**k for k in range(gamma + 1))

    def _decide(self, now: float) -> None:
        costs, busy = self.costs, 1.0 if self._left else 0.0
        counts = {name: int(count) for name, count in self._counts.items()}
        reading = Reading(
            time=now,
            **counts,
            decoding=len(self._left),
            running=len(self._left),
            waiting=self._waiting,
            targets=self.target.up,
            drafts=self.draft.up,
            target_busy=busy,
            draft_busy=busy,
            acceptance=self.acceptance(now),
            target_base=costs.target_base,
            target_row=costs.target_row,
            draft_pass=costs.draft_pass,
            draft_row=costs.draft_row,
            room=float(costs.pages),
        )
        self._readings = add_reading(self._readings, reading)
        figures = figures_of(self._readings, costs.batch_size, costs.draft_length)
        decision, self._past = decide(figures, self.rules, self._past, now)
        self.decisions.append((now, decision))
        if decision.target is not None:
            self.target.follow(decision.target, now, self.start_seconds)
        if decision.draft is not None:
            self.draft.follow(decision.draft, now, self.start_seconds)
