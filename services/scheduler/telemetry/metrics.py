"""The scheduler's metrics: every one is defined in this module, with the code that counts or reads its figure.

What the reports of offline commands need as well is counted in `statistics` and read from there; what the core alone
knows is read from its snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric as Family

from scheduler.messages import FinishReason, RefusalCause, Role, RowResult, RowStatus, SendStep, SequenceRequest
from scheduler.statistics import DraftingSnapshot, KeySnapshot, Snapshot, WorkerSnapshot
from scheduler.transitions.admission_limits import LIMITS
from services.observability.metric_set import Figures, Kind, Metric, MetricSet
from services.observability.observer import FAILED, SequenceEnd, ServiceObserver, StepTimings
from services.scheduler.telemetry.statistics import StatisticsSnapshot

_GAUGE, _COUNTER = Kind.GAUGE, Kind.COUNTER
_KEY = "key"
_QUEUE_BOUNDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
_GROUP_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
_LENGTH_BOUNDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)

# Values of labels, all of them there from the start, so that a first increase is seen as one.
_OUTCOMES = (*(reason.value for reason in FinishReason), FAILED)
_NO_TARGET = "no_target"
_REFUSALS = (*(cause.value for cause in RefusalCause), _NO_TARGET)
_KV_LOST = "kv_lost"
_RECOVERIES = (*(f"{role.value}_lost" for role in (Role.TARGET, Role.DRAFT)), _KV_LOST)
_ROW_ERRORS = tuple(status.value for status in RowStatus if status is not RowStatus.OK)

_LOST_KV = (RowStatus.UNKNOWN_SEQUENCE, RowStatus.KV_MISMATCH)


@dataclass(frozen=True, slots=True)
class Reading:
    """A scheduler at the moment of a scrape. `workers` are those in use; `wanted` is empty without autoscaling."""

    core: Snapshot
    statistics: StatisticsSnapshot
    workers: tuple[WorkerSnapshot, ...]
    queue_limit: int
    sessions: int = 0
    uptime_seconds: float = 0.0
    wanted: Mapping[Role, int] = field(default_factory=dict)

    def workers_of(self, role: Role) -> list[WorkerSnapshot]:
        return [worker for worker in self.workers if worker.role is role]

    def pages(self) -> dict[str, int]:
        """KV pages of each role's workers."""
        return {role.value: sum(worker.total_pages for worker in self.workers_of(role)) for role in Role}

    def used_pages(self) -> dict[str, int]:
        return {
            role.value: sum(worker.total_pages - worker.free_pages for worker in self.workers_of(role)) for role in Role
        }


class SchedulerMetrics(ServiceObserver):
    """Counters only go up, from 0 at the scheduler's start."""

    def __init__(self) -> None:
        self._entered: dict[int, float] = {}
        self._set: MetricSet[Reading] = MetricSet()
        self._define_live_set(self._set)
        self._define_workers(self._set)
        self._define_groups(self._set)
        self._define_speculation(self._set)
        self._define_kv(self._set)
        self._define_keys(self._set)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return self._set.metrics

    def families(self, reading: Reading) -> Iterator[Family]:
        return self._set.families(reading)

    # Definitions.

    def _define_live_set(self, of: MetricSet[Reading]) -> None:
        of.read(_GAUGE, "num_requests_running", "Sequences being worked on.", lambda now: now.core.running)
        of.read(
            _GAUGE,
            "num_requests_waiting",
            "Sequences that nobody works on yet.",
            lambda now: now.core.waiting,
        )
        of.read(_GAUGE, "live_sequences", "All unfinished sequences, waiting ones too.", lambda now: now.core.live)
        of.read(
            _GAUGE,
            "running_sequences",
            "Running sequences by state: prefilling, drafting, drafted, verifying or moving.",
            lambda now: {
                "prefilling": now.core.prefilling,
                "drafting": now.core.drafting,
                "drafted": now.core.drafted,
                "verifying": now.core.verifying,
                "moving": now.core.moving,
            },
            "state",
        )
        of.read(_GAUGE, "max_running_sequences", "Sequences that may run at a time.", lambda now: now.core.max_running)
        of.read(_GAUGE, "queue_limit", "Sequences that may wait before more are refused.", lambda now: now.queue_limit)
        of.read(
            _COUNTER,
            "sequences_total",
            "Sequences that ended: stop, length, cancelled or failed.",
            lambda now: _all_of(_OUTCOMES, now.statistics.outcomes),
            "outcome",
        )
        self._refusals = of.counter(
            "refusals_total",
            "Sequences refused: queue_full, key_limit, too_long, invalid or no_target.",
            "cause",
            _REFUSALS,
        )
        self._queue_time = of.histogram(
            "request_queue_time_seconds",
            "From a sequence's submission to the first step that works on it.",
            _QUEUE_BOUNDS,
        )
        of.read(
            _COUNTER,
            "num_preemptions_total",
            "Running sequences sent back to wait so that others get their KV pages or their slot.",
            lambda now: now.core.preemptions,
        )
        self._recoveries = of.counter(
            "recoveries_total",
            "Sequences that went on from their tokens after a loss: target_lost, draft_lost (a worker that they were "
            "on), or kv_lost (a target lacked KV that it should have had).",
            "cause",
            _RECOVERIES,
        )
        self._lease_expiries = of.counter(
            "lease_expiries_total", "Sessions of gateways that ended because nothing came."
        )
        of.read(_GAUGE, "gateway_sessions", "Gateways that have a session.", lambda now: now.sessions)
        of.read(
            _GAUGE,
            "scheduler_uptime_seconds",
            "Age of the scheduler; its counters began with it.",
            lambda now: now.uptime_seconds,
        )

    def _define_workers(self, of: MetricSet[Reading]) -> None:
        of.read(
            _GAUGE,
            "workers",
            "Workers in use.",
            lambda now: {role.value: len(now.workers_of(role)) for role in Role},
            "role",
        )
        of.read(
            _GAUGE,
            "workers_wanted",
            "Workers that the autoscaling policy wants, where there is one.",
            lambda now: {role.value: count for role, count in now.wanted.items()},
            "role",
        )
        of.read(
            _COUNTER,
            "workers_lost_total",
            "Times that a worker in use was lost or taken out of use.",
            lambda now: now.statistics.workers_lost_by_role,
            "role",
        )
        of.read(
            _COUNTER,
            "worker_steps_total",
            "Steps answered.",
            lambda now: {
                Role.DRAFT.value: now.statistics.draft_steps,
                Role.TARGET.value: now.statistics.target_steps,
            },
            "role",
        )
        of.read(
            _COUNTER,
            "worker_busy_seconds_total",
            "Time of workers in forward passes and sampling. Divided by worker_seconds_total: their utilisation.",
            lambda now: now.statistics.busy_seconds,
            "role",
        )
        of.read(
            _COUNTER,
            "worker_seconds_total",
            "Time of workers from their first step to their last, times without any unfinished sequence left out.",
            lambda now: now.statistics.worker_seconds,
            "role",
        )
        of.read(
            _COUNTER,
            "draft_hidden_seconds_total",
            "Part of the drafts' worker_busy_seconds_total during which a target was busy too.",
            lambda now: now.statistics.hidden_draft_seconds,
        )
        of.read(
            _COUNTER,
            "realignment_seconds_total",
            "Time of targets that rows of unequal length cost on top.",
            lambda now: now.statistics.realignment_seconds,
        )
        of.read(
            _COUNTER,
            "scheduler_core_seconds_total",
            "Time that the scheduler core computed.",
            lambda now: now.statistics.core_seconds,
        )
        of.read(
            _COUNTER,
            "row_errors_total",
            "Rows that a worker answered otherwise than asked: unknown_sequence, kv_mismatch, out_of_pages, invalid or "
            "failed.",
            lambda now: _all_of(_ROW_ERRORS, now.statistics.row_errors),
            "status",
        )

    def _define_groups(self, of: MetricSet[Reading]) -> None:
        of.read_histogram(
            "verify_group_rows",
            "Rows of verify groups, the group size.",
            _GROUP_BOUNDS,
            lambda now: now.statistics.group_sizes,
        )
        of.read(
            _COUNTER,
            "verify_groups_total",
            "Verify groups by shape: single (one row), equal_length (two rows or more of one length) or ragged.",
            lambda now: now.statistics.groups_by_shape,
            "shape",
        )
        of.read(
            _COUNTER,
            "realigned_rows_total",
            "Rows of ragged verify groups.",
            lambda now: now.statistics.realigned_rows,
        )
        of.read(
            _COUNTER,
            "wait_bound_hits_total",
            "Verify groups of the oldest rows because one had waited as long as it may.",
            lambda now: now.statistics.forced_groups,
        )

    def _define_speculation(self, of: MetricSet[Reading]) -> None:
        of.read(
            _COUNTER,
            "spec_decode_num_drafts_total",
            "Rounds with a draft.",
            lambda now: now.statistics.drafted_rounds,
        )
        of.read(
            _COUNTER,
            "spec_decode_num_draft_tokens_total",
            "Tokens proposed and verified.",
            lambda now: now.statistics.drafted,
        )
        of.read(
            _COUNTER,
            "spec_decode_num_accepted_tokens_total",
            "Proposed tokens that were accepted and became output.",
            lambda now: now.statistics.accepted,
        )
        of.read(
            _COUNTER,
            "spec_decode_num_accepted_tokens_per_pos_total",
            "Accepted tokens by their position in the proposal, from 0 on; the last position, 15, stands for all "
            "beyond.",
            lambda now: {str(position): count for position, count in enumerate(now.statistics.accepted_per_position)},
            "position",
        )
        of.read_histogram(
            "spec_decode_accepted_length",
            "Accepted tokens of rounds with a draft.",
            _LENGTH_BOUNDS,
            lambda now: now.statistics.accepted_lengths,
        )
        of.read_histogram(
            "spec_decode_draft_length",
            "Draft length chosen for verified rounds; 0 is plain decoding.",
            _LENGTH_BOUNDS,
            lambda now: now.core.draft_lengths,
        )
        of.read(
            _COUNTER,
            "draft_ahead_outcomes_total",
            "Verifications during which the draft was to prepare for outcomes.",
            lambda now: now.core.outcomes_sought,
        )
        of.read(
            _COUNTER,
            "draft_ahead_outcomes_prepared_total",
            "Those of them with an outcome that the draft had prepared for: the next one needed no draft step.",
            lambda now: now.core.outcomes_found,
        )
        of.read(
            _GAUGE,
            "draft_length_chosen",
            "Tokens that a target's sequences draft in a round at most, under policy auto; 0 is plain decoding.",
            lambda now: {_pair(one): float(one.length) for one in now.core.drafting_now},
            "target",
            "draft",
        )
        of.read(
            _GAUGE,
            "draft_gain_expected",
            "Expected tokens a second with that length, over those of plain decoding.",
            lambda now: {_pair(one): one.gain for one in now.core.drafting_now},
            "target",
            "draft",
        )

    def _define_kv(self, of: MetricSet[Reading]) -> None:
        of.read(
            _GAUGE,
            "kv_cache_usage_perc",
            "KV pages in use of all workers, 1 for all of them.",
            lambda now: sum(now.used_pages().values()) / max(sum(now.pages().values()), 1),
        )
        of.read(_GAUGE, "kv_pages", "KV pages that workers in use have.", lambda now: now.pages(), "role")
        of.read(_GAUGE, "kv_pages_used", "KV pages set aside for sequences.", lambda now: now.used_pages(), "role")
        of.read(
            _COUNTER,
            "prefix_cache_queries_total",
            "Positions of sequences when they were opened at a worker.",
            lambda now: now.statistics.prefix_queries,
            "role",
        )
        of.read(
            _COUNTER,
            "prefix_cache_hits_total",
            "Positions whose KV was taken over from other sequences.",
            lambda now: now.statistics.prefix_hits,
            "role",
        )
        of.read(
            _COUNTER,
            "kv_moves_total",
            "Sequences that left a draining target: moved with their KV, failed to, or rehomed without it "
            "because that was sooner.",
            lambda now: {
                "moved": now.core.moves.moves,
                "failed": now.core.moves.failed,
                "rehomed": now.core.moves.rehomed,
            },
            "outcome",
        )
        of.read(
            _COUNTER,
            "kv_move_positions_total",
            "Positions whose KV was moved.",
            lambda now: now.core.moves.positions,
        )
        of.read(_COUNTER, "kv_move_bytes_total", "Bytes of KV moved.", lambda now: now.core.moves.bytes)
        of.read(
            _COUNTER,
            "kv_move_seconds_total",
            "Time that moves of KV took that got through.",
            lambda now: now.core.moves.seconds,
        )

    def _define_keys(self, of: MetricSet[Reading]) -> None:
        """By API key. Names come from the configuration alone, so that nobody who asks can add one."""

        def by_key(figure: Callable[[KeySnapshot], int]) -> Callable[[Reading], Figures]:
            return lambda now: {key.name: figure(key) for key in now.core.keys}

        of.read(_GAUGE, "key_requests_running", "Sequences being worked on.", by_key(lambda key: key.running), _KEY)
        of.read(
            _GAUGE, "key_requests_waiting", "Sequences that nobody works on yet.", by_key(lambda key: key.waiting), _KEY
        )
        of.read(
            _COUNTER,
            "key_prompt_tokens_total",
            "Prompt tokens computed, those found in the prefix cache among them.",
            by_key(lambda key: key.prompt_tokens),
            _KEY,
        )
        of.read(
            _COUNTER,
            "key_generation_tokens_total",
            "Output tokens committed.",
            by_key(lambda key: key.output_tokens),
            _KEY,
        )
        of.read(
            _COUNTER,
            "key_refusals_total",
            "Sequences refused by a limit: of the key (tokens_per_minute, max_waiting) or of the queue "
            "(max_queued_sequences, max_queued_tokens).",
            _refusals_by_limit,
            _KEY,
            "limit",
        )

    # Counts.

    def refused(self, cause: RefusalCause) -> None:
        """A request that did not even enter."""
        self._refusals.labels(cause.value).inc()

    def refused_without_target(self) -> None:
        self._refusals.labels(_NO_TARGET).inc()

    def lease_expired(self) -> None:
        self._lease_expiries.inc()

    def sequence_entered(self, request: SequenceRequest, traceparent: str, now: float) -> None:
        self._entered[request.sequence_id] = now

    def step_sent(self, role: Role, step: SendStep, now: float) -> None:
        """The first step that works on a sequence opens it at its worker."""
        for row in step.rows:
            if row.opening is not None:
                entered = self._entered.pop(row.sequence_id, None)
                if entered is not None:
                    self._queue_time.observe(now - entered)

    def step_replied(
        self, role: Role, step: SendStep, results: tuple[RowResult, ...], timings: StepTimings, now: float
    ) -> None:
        lost = sum(result.status in _LOST_KV for result in results) if role is Role.TARGET else 0
        if lost:
            self._recoveries.labels(_KV_LOST).inc(lost)

    def worker_lost(self, role: Role, worker_id: str, sequences: int) -> None:
        self._recoveries.labels(f"{role.value}_lost").inc(sequences)

    def sequence_ended(self, sequence_id: int, end: SequenceEnd, now: float) -> None:
        self._entered.pop(sequence_id, None)
        if end.cause is not None:
            self._refusals.labels(end.cause.value).inc()


def _refusals_by_limit(now: Reading) -> dict[tuple[str, ...], float]:
    return {(key.name, limit): key.refusals.get(limit, 0) for key in now.core.keys for limit in LIMITS}


def _all_of(values: Iterable[str], counts: Mapping[str, int]) -> dict[str, int]:
    return {value: counts.get(value, 0) for value in values}


def _pair(one: DraftingSnapshot) -> tuple[str, ...]:
    return one.target_id, one.draft_id
