"""Counts tokens, rounds, groups and sequences, and where the workers' time goes: once, for reports, status and metrics.

A round is one answer of a target to one sequence that it verified. What the core alone knows (preemptions, draft
lengths, KV moves) is counted there: scheduler/statistics.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spool.scheduler.messages import (
    EmitTokens,
    ProposalSource,
    Role,
    RowStatus,
    SendStep,
    SequenceRequest,
    StepCompleted,
)
from spool.scheduler.statistics import Counters
from spool.services.observability.observer import FAILED, REFUSED, SequenceEnd, ServiceObserver, StepTimings

POSITIONS = 16
"""Positions of a proposal that are told apart; the last of them stands for all beyond."""


def _by_source() -> dict[str, int]:
    return {source.value: 0 for source in ProposalSource}


@dataclass(frozen=True, slots=True)
class StatisticsSnapshot:
    """Counts since the start, or since the last reset. Times are seconds; every share lies in [0, 1].

    Tokens. `tokens` counts committed output tokens delivered. `seconds` is the time in which at least one sequence was
    unfinished, and `tokens_per_second` their quotient.

    Rounds. A sequence's first tokens come out of its prefill; every other delivery is that of one round. `deliveries`
    counts both kinds. `committed_per_round` is tokens of rounds over rounds, `acceptance_rate` accepted over drafted
    tokens, `accepted_lengths` the number of rounds for each number of accepted tokens, rounds without a draft left out.
    `drafted_by` and `accepted_by` are the drafted and accepted tokens by who proposed them, as far as targets told.

    Sequences. `outcomes` counts those that ended, by FinishReason, FAILED and REFUSED; `finished`, `failed` and
    `refused` are sums of it. `row_errors` counts rows that a target answered otherwise than asked, by status.

    Draft workers. `proposals_asked` counts the rows that count on a proposal of theirs, `proposals_in_time` those that
    had one, and `proposals_ahead` those that had it before it was asked for: targets would have waited for these for
    `hidden_seconds`.

    Prefixes. `prefix_queries` counts the committed positions of sequences when they were opened at a target, and
    `prefix_hits` the positions whose KV a target took over from other sequences instead of computing it.

    Groups. A group is the rows that one step verifies, prefill chunks not counted. `mean_group_size` is rows over
    groups; `equal_length_share` is, of the groups of at least two rows, the part whose rows all had the same length
    (a single row is equal to itself and says nothing). `realigned_rows` are those of the other groups of at least two.

    Time of the targets. The whole of it is, for each target, the time from the start of its first step to the end of
    its last, less the time in which no sequence was unfinished; with several targets both parts of a quotient are sums.
    Five shares add up to 1:
    - `target_busy_share`: forward passes and sampling;
    - `realignment_share`: what rows of unequal length cost on top, in the worker's preparation;
    - `drafting_share`: proposing, or waiting for a draft worker to;
    - `scheduling_share`: the worker's preparation otherwise (checking rows, packing, replies), and the time the
      scheduler core computed while the target had no step, running or queued;
    - `waiting_share`: the target had no step for other reasons: the wire, rows that wait for others.
    `lost_share` is 1 - `target_busy_share`. `core_seconds` is all the time the scheduler core computed. What the shares
    are made of, in seconds and by role: `busy_seconds`, and `worker_seconds` for the whole, of draft workers the time
    in which they said so as they registered; `realignment_seconds` and `drafting_seconds` of the targets.
    """

    tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    finished: int = 0
    failed: int = 0
    refused: int = 0
    unfinished: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    deliveries: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    committed_per_round: float = 0.0
    acceptance_rate: float = 0.0
    accepted_lengths: dict[int, int] = field(default_factory=dict)
    drafted_by: dict[str, int] = field(default_factory=_by_source)
    accepted_by: dict[str, int] = field(default_factory=_by_source)
    groups: int = 0
    mean_group_size: float = 0.0
    group_sizes: dict[int, int] = field(default_factory=dict)
    equal_length_groups: int = 0
    ragged_groups: int = 0
    equal_length_share: float = 0.0
    realigned_rows: int = 0
    forced_groups: int = 0
    proposals_asked: int = 0
    proposals_in_time: int = 0
    proposals_ahead: int = 0
    hidden_seconds: float = 0.0
    target_steps: int = 0
    packed_rows: int = 0
    padding_rows: int = 0
    target_busy_share: float = 0.0
    waiting_share: float = 0.0
    realignment_share: float = 0.0
    drafting_share: float = 0.0
    scheduling_share: float = 0.0
    lost_share: float = 0.0
    core_seconds: float = 0.0
    busy_seconds: dict[str, float] = field(default_factory=dict)
    worker_seconds: dict[str, float] = field(default_factory=dict)
    realignment_seconds: float = 0.0
    drafting_seconds: float = 0.0
    workers_lost: int = 0
    workers_lost_by_role: dict[str, int] = field(default_factory=dict)
    prefix_queries: int = 0
    prefix_hits: int = 0
    row_errors: dict[str, int] = field(default_factory=dict)

    @property
    def drafted_rounds(self) -> int:
        return sum(self.accepted_lengths.values())

    @property
    def accepted_per_position(self) -> list[int]:
        """Accepted tokens at each of POSITIONS positions: a round that accepted n has them at 0 to n - 1."""
        accepted = [0] * POSITIONS
        for length, rounds in self.accepted_lengths.items():
            for position in range(length):
                accepted[min(position, POSITIONS - 1)] += rounds
        return accepted

    @property
    def groups_by_shape(self) -> dict[str, int]:
        single = self.group_sizes.get(1, 0)
        return {"single": single, "equal_length": self.equal_length_groups, "ragged": self.ragged_groups}

    def to_json(self) -> dict[str, Any]:
        return {
            name: {str(key): count for key, count in value.items()} if isinstance(value, dict) else value
            for name, value in asdict(self).items()
        }


@dataclass(slots=True)
class _WorkerTime:
    """Seconds of one target. `vacant_at_reply` is where the vacancy clock stood at the last reply."""

    steps: int = 0
    total: float = 0.0
    idle: float = 0.0
    busy: float = 0.0
    realign: float = 0.0
    drafting: float = 0.0
    core_while_idle: float = 0.0
    packed_rows: int = 0
    padding_rows: int = 0
    vacant_at_reply: float | None = None
    vacant_at_send: dict[int, float] = field(default_factory=dict)

    @property
    def whole(self) -> float:
        return self.total + self.idle

    def add(self, other: _WorkerTime) -> None:
        """Adds the figures of another one."""
        self.steps += other.steps
        self.total += other.total
        self.idle += other.idle
        self.busy += other.busy
        self.realign += other.realign
        self.drafting += other.drafting
        self.core_while_idle += min(other.core_while_idle, other.idle)
        self.packed_rows += other.packed_rows
        self.padding_rows += other.padding_rows


class ServiceStatistics(ServiceObserver):
    """Collects while the service runs."""

    def __init__(self, now: float) -> None:
        self._targets: dict[str, _WorkerTime] = {}
        self._gone = _WorkerTime()
        """All targets that are gone, together: every new start of a worker has another name."""
        self._begun: set[int] = set()
        self._unfinished = 0
        # When the number of unfinished sequences last left 0 or came back to it.
        self._turned = now
        self._vacant_seconds = 0.0
        self._clear(now, Counters())

    def reset(self, now: float, core: Counters) -> None:
        """Starts again from nothing; sequences and steps under way count from here on. `core`: what it has counted."""
        for worker_id, target in self._targets.items():
            self._targets[worker_id] = _WorkerTime(vacant_at_send=dict.fromkeys(target.vacant_at_send, 0.0))
        self._gone = _WorkerTime()
        self._clear(now, core)

    def sequence_entered(self, request: SequenceRequest, request_id: str, traceparent: str, now: float) -> None:
        if self._unfinished == 0:
            self._vacant_seconds += now - self._turned
            self._turned = now
        self._unfinished += 1

    def sequence_ended(self, sequence_id: int, end: SequenceEnd, now: float) -> None:
        self._outcomes[end.outcome] += 1
        self._begun.discard(sequence_id)
        self._unfinished -= 1
        if self._unfinished == 0:
            self._turned = now

    def tokens_emitted(self, emissions: Sequence[EmitTokens]) -> None:
        begun, before = self._begun, len(self._begun)
        for emission in emissions:
            tokens = len(emission.tokens)
            self._tokens += tokens
            if emission.sequence_id not in begun:
                begun.add(emission.sequence_id)
                continue
            self._round_tokens += tokens
            if emission.drafted:
                self._drafted += emission.drafted
                self._accepted += emission.accepted
                self._accepted_lengths[emission.accepted] += 1
                if emission.source is not None:
                    self._drafted_by[emission.source.value] += emission.drafted
                    self._accepted_by[emission.source.value] += emission.accepted
        self._deliveries += len(emissions)
        self._rounds += len(emissions) - (len(begun) - before)

    def step_sent(self, step: SendStep, now: float) -> None:
        target = self._targets.setdefault(step.worker_id, _WorkerTime())
        target.vacant_at_send[step.step_id] = self._vacant(now)
        if step.grouped:
            self._group_sizes[step.grouped] += 1
            self._forced_groups += step.forced

    def step_replied(self, step: SendStep, answer: StepCompleted, timings: StepTimings, now: float) -> None:
        target = self._targets.setdefault(step.worker_id, _WorkerTime())
        sent = target.vacant_at_send.pop(step.step_id, None)
        if target.vacant_at_reply is not None and sent is not None:
            target.idle += max(timings.idle - max(sent - target.vacant_at_reply, 0.0), 0.0)
        target.vacant_at_reply = self._vacant(now)
        target.steps += 1
        target.total += timings.total
        target.busy += timings.forward + timings.sample
        target.realign += timings.realign
        target.drafting += timings.drafting
        target.packed_rows += timings.packed_rows
        target.padding_rows += timings.padding_rows
        if (report := answer.drafting) is not None:
            self._proposals_asked += report.asked
            self._proposals_in_time += report.in_time
            self._proposals_ahead += report.ahead
            self._hidden_seconds += report.hidden_seconds
        for row, result in zip(step.rows, answer.results, strict=True):
            if result.status is not RowStatus.OK and result.status is not RowStatus.VOID:
                self._row_errors[result.status.value] += 1
            self._prefix_queries += len(row.committed)
            self._prefix_hits += result.reused

    def draft_registered(self, worker_id: str, seconds: float, busy_seconds: float, now: float) -> None:
        vacant = self._vacant(now)
        before = self._vacant_at_registration.get(worker_id)
        self._vacant_at_registration[worker_id] = vacant
        if before is not None:
            self._draft_seconds += max(seconds - (vacant - before), 0.0)
            self._draft_busy += busy_seconds

    def worker_lost(self, role: Role, worker_id: str, sequences: int) -> None:
        self._workers_lost[role] += 1
        self._vacant_at_registration.pop(worker_id, None)
        target = self._targets.pop(worker_id, None)
        if target is not None:
            self._gone.add(target)

    def core_ran(self, seconds: float) -> None:
        self._core_seconds += seconds
        if self._unfinished == 0:
            return
        for target in self._targets.values():
            if target.steps and not target.vacant_at_send:
                target.core_while_idle += seconds

    def snapshot(self, now: float, core: Counters) -> StatisticsSnapshot:
        """`core`: what it has counted by now."""
        targets = [self._gone, *self._targets.values()]
        whole = sum(target.whole for target in targets)
        busy = sum(target.busy for target in targets)
        realign = sum(target.realign for target in targets)
        drafting = sum(target.drafting for target in targets)
        core_idle = sum(min(target.core_while_idle, target.idle) for target in targets)
        waiting = sum(target.idle for target in targets) - core_idle
        busy_share = _share(busy, whole)
        seconds = now - self._since - self._vacant(now)
        groups = sum(self._group_sizes.values())
        equal, ragged, rows = (now - before for now, before in zip(_shapes(core), self._shapes_before, strict=True))
        return StatisticsSnapshot(
            tokens=self._tokens,
            seconds=seconds,
            tokens_per_second=_quotient(self._tokens, seconds),
            finished=self._outcomes.total() - self._outcomes[FAILED] - self._outcomes[REFUSED],
            failed=self._outcomes[FAILED],
            refused=self._outcomes[REFUSED],
            unfinished=self._unfinished,
            outcomes=dict(self._outcomes),
            deliveries=self._deliveries,
            rounds=self._rounds,
            drafted=self._drafted,
            accepted=self._accepted,
            committed_per_round=_quotient(self._round_tokens, self._rounds),
            acceptance_rate=_quotient(self._accepted, self._drafted),
            accepted_lengths=dict(sorted(self._accepted_lengths.items())),
            drafted_by=dict(self._drafted_by),
            accepted_by=dict(self._accepted_by),
            groups=groups,
            mean_group_size=_quotient(sum(rows * count for rows, count in self._group_sizes.items()), groups),
            group_sizes=dict(sorted(self._group_sizes.items())),
            equal_length_groups=equal,
            ragged_groups=ragged,
            equal_length_share=_quotient(equal, equal + ragged),
            realigned_rows=rows,
            forced_groups=self._forced_groups,
            proposals_asked=self._proposals_asked,
            proposals_in_time=self._proposals_in_time,
            proposals_ahead=self._proposals_ahead,
            hidden_seconds=self._hidden_seconds,
            target_steps=sum(target.steps for target in targets),
            packed_rows=sum(target.packed_rows for target in targets),
            padding_rows=sum(target.padding_rows for target in targets),
            target_busy_share=busy_share,
            waiting_share=_share(waiting, whole),
            realignment_share=_share(realign, whole),
            drafting_share=_share(drafting, whole),
            scheduling_share=_share(whole - busy - realign - drafting - waiting, whole),
            lost_share=1.0 - busy_share if whole else 0.0,
            core_seconds=self._core_seconds,
            busy_seconds={"draft": self._draft_busy, "target": busy},
            worker_seconds={"draft": self._draft_seconds, "target": whole},
            realignment_seconds=realign,
            drafting_seconds=drafting,
            workers_lost=self._workers_lost.total(),
            workers_lost_by_role={role.value: self._workers_lost[role] for role in Role},
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            row_errors=dict(self._row_errors),
        )

    def _clear(self, now: float, core: Counters) -> None:
        self._since = now
        self._turned = now
        self._vacant_seconds = 0.0
        self._tokens = self._deliveries = 0
        self._outcomes: Counter[str] = Counter()
        self._rounds = self._round_tokens = self._drafted = self._accepted = 0
        self._accepted_lengths: Counter[int] = Counter()
        self._drafted_by, self._accepted_by = _by_source(), _by_source()
        self._group_sizes: Counter[int] = Counter()
        self._forced_groups = 0
        self._shapes_before = _shapes(core)
        self._proposals_asked = self._proposals_in_time = self._proposals_ahead = 0
        self._hidden_seconds = 0.0
        self._draft_busy = self._draft_seconds = 0.0
        self._vacant_at_registration: dict[str, float] = {}
        self._workers_lost: Counter[Role] = Counter()
        self._row_errors: Counter[str] = Counter()
        self._prefix_queries = self._prefix_hits = 0
        self._core_seconds = 0.0

    def _vacant(self, now: float) -> float:
        """Seconds up to now in which no sequence was unfinished."""
        return self._vacant_seconds + (now - self._turned if self._unfinished == 0 else 0.0)


def _shapes(core: Counters) -> tuple[int, int, int]:
    return core.equal_length_groups, core.ragged_groups, core.ragged_rows


def _quotient(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _share(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole else 0.0
