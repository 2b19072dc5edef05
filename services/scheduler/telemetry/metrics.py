"""The scheduler's metrics: every one is defined in this module, with the code that counts or reads its figure.

What the reports of offline commands need as well is counted in `statistics` and read from there; what the core alone
knows is read from its snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import Metric as Family

from spool.scheduler.messages import (
    FinishReason,
    RefusalCause,
    Role,
    RowStatus,
    SendStep,
    SequenceRequest,
    StepCompleted,
)
from spool.scheduler.statistics import Snapshot, WorkerSnapshot
from spool.scheduler.transitions.admission_limits import LIMITS
from spool.services.observability.metric_set import Metric, MetricSet
from spool.services.observability.observer import FAILED, SequenceEnd, ServiceObserver, StepTimings
from spool.services.rpc.certificates import RenewedCertificate
from spool.services.scheduler.telemetry.statistics import StatisticsSnapshot

_QUEUE_BOUNDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
_GROUP_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
_LENGTH_BOUNDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)

# Values of labels, all of them there from the start, so that a first increase is seen as one.
_OUTCOMES = (*(reason.value for reason in FinishReason), FAILED)
_NO_TARGET = "no_target"
_REFUSALS = (*(cause.value for cause in RefusalCause), _NO_TARGET)
_KV_LOST = "kv_lost"
_RECOVERIES = (*(f"{role.value}_lost" for role in (Role.TARGET, Role.DRAFT)), _KV_LOST)
_ROW_ERRORS = tuple(status.value for status in RowStatus if status not in (RowStatus.OK, RowStatus.VOID))

_LOST_KV = (RowStatus.UNKNOWN_SEQUENCE, RowStatus.KV_MISMATCH)


@dataclass(frozen=True, slots=True)
class Reading:
    """A scheduler at the moment of a scrape. `workers` are those in use, and `draft_queue` counts the sequences that
    wait for drafts; `wanted` is empty without autoscaling, `certificate` None without mutual TLS."""

    core: Snapshot
    statistics: StatisticsSnapshot
    workers: tuple[WorkerSnapshot, ...]
    queue_limit: int
    draft_queue: int = 0
    sessions: int = 0
    uptime_seconds: float = 0.0
    wanted: Mapping[Role, int] = field(default_factory=dict)
    certificate: RenewedCertificate[Any] | None = None

    def workers_of(self, role: Role) -> list[WorkerSnapshot]:
        return [worker for worker in self.workers if worker.role is role]

    @property
    def running_by_state(self) -> dict[str, int]:
        states = ("prefilling", "idle", "verifying", "moving")
        return {state: getattr(self.core, state) for state in states}

    @property
    def outcomes(self) -> dict[str, int]:
        return {outcome: self.statistics.outcomes.get(outcome, 0) for outcome in _OUTCOMES}

    @property
    def row_errors(self) -> dict[str, int]:
        return {status: self.statistics.row_errors.get(status, 0) for status in _ROW_ERRORS}

    @property
    def worker_counts(self) -> dict[str, int]:
        return {role.value: len(self.workers_of(role)) for role in Role}

    @property
    def workers_wanted(self) -> dict[str, int]:
        return {role.value: count for role, count in self.wanted.items()}

    @property
    def certificate_expiry(self) -> dict[str, float]:
        return {} if self.certificate is None else {"scheduler": self.certificate.expiry_timestamp()}

    # Of targets alone, under the label `role` that other figures of workers have.

    @property
    def steps(self) -> dict[str, int]:
        return {Role.TARGET.value: self.statistics.target_steps}

    @property
    def prefix_queries(self) -> dict[str, int]:
        return {Role.TARGET.value: self.statistics.prefix_queries}

    @property
    def prefix_hits(self) -> dict[str, int]:
        return {Role.TARGET.value: self.statistics.prefix_hits}

    @property
    def accepted_by_position(self) -> dict[str, int]:
        return {str(position): count for position, count in enumerate(self.statistics.accepted_per_position)}

    @property
    def draft_lengths(self) -> dict[tuple[str, ...], int]:
        return {(one.target_id, one.draft_id): one.length for one in self.core.drafting_now}

    @property
    def draft_gains(self) -> dict[tuple[str, ...], float]:
        return {(one.target_id, one.draft_id): one.gain for one in self.core.drafting_now}

    @property
    def pages(self) -> dict[str, int]:
        return {role.value: sum(worker.total_pages for worker in self.workers_of(role)) for role in Role}

    @property
    def used_pages(self) -> dict[str, int]:
        free = {role.value: sum(worker.free_pages for worker in self.workers_of(role)) for role in Role}
        return {role: total - free[role] for role, total in self.pages.items()}

    @property
    def kv_usage(self) -> float:
        return sum(self.used_pages.values()) / max(sum(self.pages.values()), 1)

    @property
    def kv_moves(self) -> dict[str, int]:
        moves = self.core.moves
        return {"moved": moves.moves, "failed": moves.failed, "rehomed": moves.rehomed}

    # Names of keys come from the configuration alone, so that nobody who asks can add one.

    @property
    def key_running(self) -> dict[str, int]:
        return {key.name: key.running for key in self.core.keys}

    @property
    def key_waiting(self) -> dict[str, int]:
        return {key.name: key.waiting for key in self.core.keys}

    @property
    def key_prompt_tokens(self) -> dict[str, int]:
        return {key.name: key.prompt_tokens for key in self.core.keys}

    @property
    def key_output_tokens(self) -> dict[str, int]:
        return {key.name: key.output_tokens for key in self.core.keys}

    @property
    def key_refusals(self) -> dict[tuple[str, ...], int]:
        return {(key.name, limit): key.refusals.get(limit, 0) for key in self.core.keys for limit in LIMITS}


_READ = """
gauge num_requests_running core.running
    Sequences being worked on.
gauge num_requests_waiting core.waiting
    Sequences that nobody works on yet.
gauge live_sequences core.live
    All unfinished sequences, waiting ones too.
gauge running_sequences running_by_state state
    Running sequences by state: prefilling, idle (between two rounds), verifying or moving.
gauge max_running_sequences core.max_running
    Sequences that may run at a time.
gauge queue_limit queue_limit
    Sequences that may wait before more are refused.
counter sequences_total outcomes outcome
    Sequences that ended: stop, length, cancelled or failed.
counter num_preemptions_total core.preemptions
    Running sequences sent back to wait so that others get their KV pages.
gauge gateway_sessions sessions
    Gateways that have a session.
gauge scheduler_uptime_seconds uptime_seconds
    Age of the scheduler; its counters began with it.
gauge certificate_expiry_timestamp_seconds certificate_expiry server
    When the certificate that the server shows expires, in seconds since 1970.
gauge workers worker_counts role
    Workers in use.
gauge workers_wanted workers_wanted role
    Workers that the autoscaling policy wants, where there is one.
counter workers_lost_total statistics.workers_lost_by_role role
    Times that a worker in use was lost or taken out of use.
counter worker_steps_total steps role
    Steps answered.
counter worker_busy_seconds_total statistics.busy_seconds role
    Time of targets in forward passes and sampling, and of drafts computing. Divided by worker_seconds_total: their
    utilisation.
counter worker_seconds_total statistics.worker_seconds role
    Time of targets from their first step to their last, and of drafts between registrations, times without any
    unfinished sequence left out.
counter realignment_seconds_total statistics.realignment_seconds
    Time of targets that rows of unequal length cost on top.
counter scheduler_core_seconds_total statistics.core_seconds
    Time that the scheduler core computed.
counter row_errors_total row_errors status
    Rows that a worker answered otherwise than asked: unknown_sequence, kv_mismatch, out_of_pages, invalid or
    failed.
histogram verify_group_rows statistics.group_sizes rows
    Rows of verify groups, the group size.
counter verify_groups_total statistics.groups_by_shape shape
    Verify groups by shape: single (one row), equal_length (two rows or more of one length) or ragged.
counter realigned_rows_total statistics.realigned_rows
    Rows of ragged verify groups.
counter wait_bound_hits_total statistics.forced_groups
    Verify groups of the oldest rows because one must not be passed over any more, under policy exspec.
counter spec_decode_num_drafts_total statistics.drafted_rounds
    Rounds with a draft.
counter spec_decode_num_draft_tokens_total statistics.drafted
    Tokens proposed and verified.
counter spec_decode_num_accepted_tokens_total statistics.accepted
    Proposed tokens that were accepted and became output.
counter draft_tokens_by_source_total statistics.drafted_by source
    Tokens proposed and verified by who proposed them, as far as targets tell: draft, lookup or expected (output).
counter accepted_tokens_by_source_total statistics.accepted_by source
    Those of them that were accepted and became output.
counter spec_decode_num_accepted_tokens_per_pos_total accepted_by_position position
    Accepted tokens by their position in the proposal, from 0 on; the last position, 15, stands for all beyond.
histogram spec_decode_accepted_length statistics.accepted_lengths tokens
    Accepted tokens of rounds with a draft.
histogram spec_decode_draft_length core.draft_lengths tokens
    Draft length chosen for verified rounds; 0 is plain decoding.
counter drafting_seconds_total statistics.drafting_seconds
    Time that targets took to propose, or waited for a draft worker to.
counter draft_proposals_asked_total statistics.proposals_asked
    Rows that counted on a proposal of a draft worker.
counter draft_proposals_in_time_total statistics.proposals_in_time
    Those of them that had a proposal in time; the others were decoded plainly.
counter draft_proposals_ahead_total statistics.proposals_ahead
    Those of them that had a proposal before it was asked for.
counter draft_hidden_seconds_total statistics.hidden_seconds
    Time that targets would have waited for these.
gauge draft_queue draft_queue
    Sequences that wait for draft workers.
gauge draft_length_chosen draft_lengths target,draft
    Tokens that a target's sequences draft in a round at most, under policy auto; 0 is plain decoding.
gauge draft_gain_expected draft_gains target,draft
    Expected tokens a second with that length, over those of plain decoding.
gauge kv_cache_usage_perc kv_usage
    KV pages in use of all workers, 1 for all of them.
gauge kv_pages pages role
    KV pages that workers in use have.
gauge kv_pages_used used_pages role
    KV pages set aside for sequences.
counter prefix_cache_queries_total prefix_queries role
    Positions of sequences when they were opened at a target.
counter prefix_cache_hits_total prefix_hits role
    Positions whose KV was taken over from other sequences.
counter kv_moves_total kv_moves outcome
    Sequences that left a draining target: moved with their KV, failed to, or rehomed without it because that
    was sooner.
counter kv_move_positions_total core.moves.positions
    Positions whose KV was moved.
counter kv_move_bytes_total core.moves.bytes
    Bytes of KV moved.
counter kv_move_seconds_total core.moves.seconds
    Time that moves of KV took that got through.
gauge key_requests_running key_running key
    Sequences being worked on.
gauge key_requests_waiting key_waiting key
    Sequences that nobody works on yet.
counter key_prompt_tokens_total key_prompt_tokens key
    Prompt tokens computed, those found in the prefix cache among them.
counter key_generation_tokens_total key_output_tokens key
    Output tokens committed.
counter key_refusals_total key_refusals key,limit
    Sequences refused by a limit: of the key (tokens_per_minute, max_waiting) or of the queue
    (max_queued_sequences, max_queued_tokens).
"""
"""Kind, name, where in a reading the figure is, and labels or the name of the bounds; below, what the metric means."""


class SchedulerMetrics(ServiceObserver):
    """Counters only go up, from 0 at the scheduler's start."""

    def __init__(self) -> None:
        self._entered: dict[int, float] = {}
        self.queue_seconds: dict[int, float] = {}
        """Of each live sequence that has been worked on, the time until then."""
        self._set = of = MetricSet[Reading](_READ, {"rows": _GROUP_BOUNDS, "tokens": _LENGTH_BOUNDS})
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
        self._recoveries = of.counter(
            "recoveries_total",
            "Sequences that went on after a loss: target_lost (of the target that they were on), draft_lost (of the "
            "draft worker of that target), or kv_lost (a target lacked KV that it should have had).",
            "cause",
            _RECOVERIES,
        )
        self._lease_expiries = of.counter(
            "lease_expiries_total", "Sessions of gateways that ended because nothing came."
        )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return self._set.metrics

    def families(self, reading: Reading) -> Iterator[Family]:
        return self._set.families(reading)

    # Counts.

    def refused(self, cause: RefusalCause) -> None:
        """A request that did not even enter."""
        self._refusals.labels(cause.value).inc()

    def refused_without_target(self) -> None:
        self._refusals.labels(_NO_TARGET).inc()

    def lease_expired(self) -> None:
        self._lease_expiries.inc()

    def sequence_entered(self, request: SequenceRequest, request_id: str, traceparent: str, now: float) -> None:
        self._entered[request.sequence_id] = now

    def step_sent(self, step: SendStep, now: float) -> None:
        """The first step that works on a sequence opens it at its worker."""
        for row in step.rows:
            if row.opening is not None:
                entered = self._entered.pop(row.sequence_id, None)
                if entered is not None:
                    self.queue_seconds[row.sequence_id] = now - entered
                    self._queue_time.observe(now - entered)

    def step_replied(self, step: SendStep, answer: StepCompleted, timings: StepTimings, now: float) -> None:
        lost = sum(result.status in _LOST_KV for result in answer.results)
        if lost:
            self._recoveries.labels(_KV_LOST).inc(lost)

    def worker_lost(self, role: Role, worker_id: str, sequences: int) -> None:
        self._recoveries.labels(f"{role.value}_lost").inc(sequences)

    def sequence_ended(self, sequence_id: int, end: SequenceEnd, now: float) -> None:
        self._entered.pop(sequence_id, None)
        self.queue_seconds.pop(sequence_id, None)
        if end.cause is not None:
            self._refusals.labels(end.cause.value).inc()
