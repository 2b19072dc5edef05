"""Every metric that is exported: name, type, labels, meaning, and whose figure it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Owner(Enum):
    """Figures of gateways add up; of the scheduler, every gateway shows the same ones."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"


_OF_THE_CELL = " Of the whole cell: every gateway shows the same figure, so take max over gateways, never sum."


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` is the one that is exported, of a counter with `_total`."""

    name: str
    kind: Kind
    owner: Owner
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The name that prometheus_client wants: it adds `_total` itself."""
        return self.name.removesuffix("_total") if self.kind is Kind.COUNTER else self.name

    @property
    def help(self) -> str:
        return self.meaning if self.owner is Owner.GATEWAY else self.meaning + _OF_THE_CELL


def _own(kind: Kind, name: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"spool_{name}", kind, Owner.GATEWAY, meaning, labels)


def _cells(kind: Kind, name: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"spool_{name}", kind, Owner.SCHEDULER, meaning, labels)


_COUNTER, _GAUGE, _HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

# --- of a gateway -----------------------------------------------------------------------------------------------------

REQUEST_SUCCESS = _own(
    _COUNTER,
    "request_success_total",
    "Sequences that came to their end: stop, length, abort (the client left, or another choice failed) or error.",
    "finished_reason",
)
REQUEST_FAILURE = _own(
    _COUNTER, "request_failure_total", "Requests that were refused or failed, by kind of error.", "kind"
)
PROMPT_TOKENS = _own(_COUNTER, "prompt_tokens_total", "Prompt tokens taken in.")
GENERATION_TOKENS = _own(_COUNTER, "generation_tokens_total", "Output tokens delivered.")
DELIVERED_DRAFT_TOKENS = _own(
    _COUNTER, "delivered_draft_tokens_total", "Tokens proposed for delivered output, as responses say in their usage."
)
DELIVERED_ACCEPTED_TOKENS = _own(
    _COUNTER, "delivered_accepted_tokens_total", "Those of them that were accepted and delivered."
)
TIME_TO_FIRST_TOKEN = _own(
    _HISTOGRAM, "time_to_first_token_seconds", "From a request's arrival to a sequence's first output tokens."
)
INTER_TOKEN_LATENCY = _own(
    _HISTOGRAM,
    "inter_token_latency_seconds",
    "Between two deliveries of tokens of a sequence. One round delivers several tokens, so this is longer than the "
    "time for a token.",
)
TIME_PER_OUTPUT_TOKEN = _own(
    _HISTOGRAM,
    "request_time_per_output_token_seconds",
    "Mean time for a token after the first delivery, one observation for each sequence that stopped or reached its "
    "length.",
)
E2E_LATENCY = _own(_HISTOGRAM, "e2e_request_latency_seconds", "From a request's arrival to a sequence's end.")
SESSION_BREAKS = _own(
    _COUNTER, "scheduler_session_breaks_total", "Open sessions with a scheduler that broke; the gateway opens another."
)
RESUBMISSIONS = _own(
    _COUNTER, "resubmissions_total", "Sequences that went on in another session, with the tokens that they had."
)
SCHEDULER_UP = _own(_GAUGE, "scheduler_up", "1 where the scheduler answers this gateway, else 0.")

# --- of a cell: the pool ----------------------------------------------------------------------------------------------

RUNNING = _cells(_GAUGE, "num_requests_running", "Sequences being worked on, the window.")
WAITING = _cells(_GAUGE, "num_requests_waiting", "Sequences waiting for a place in the window.")
POOL = _cells(_GAUGE, "pool_sequences", "All live sequences, waiting ones too.")
WINDOW = _cells(
    _GAUGE,
    "window_sequences",
    "Sequences of the window by state: prefilling, drafting, drafted, verifying or moving.",
    "state",
)
WINDOW_LIMIT = _cells(_GAUGE, "window_limit", "Sequences that the window may hold.")
QUEUE_LIMIT = _cells(_GAUGE, "queue_limit", "Sequences that may wait before more are refused.")
SEQUENCES = _cells(_COUNTER, "sequences_total", "Sequences that ended: stop, length, cancelled or failed.", "outcome")
REFUSALS = _cells(_COUNTER, "refusals_total", "Sequences refused: queue_full, too_long, invalid or no_target.", "cause")
QUEUE_TIME = _cells(
    _HISTOGRAM, "request_queue_time_seconds", "From a sequence's submission to the first step that works on it."
)
PREEMPTIONS = _cells(
    _COUNTER, "num_preemptions_total", "Sequences taken out of the window so that others get their KV pages."
)
RECOVERIES = _cells(
    _COUNTER,
    "recoveries_total",
    "Sequences that went on from their tokens after a loss: target_lost, draft_lost (a worker that they were on), or "
    "kv_lost (a target lacked KV that it should have had).",
    "cause",
)
LEASE_EXPIRIES = _cells(_COUNTER, "lease_expiries_total", "Sessions of gateways that ended because nothing came.")
GATEWAY_SESSIONS = _cells(_GAUGE, "gateway_sessions", "Gateways that have a session.")
SCHEDULER_UPTIME = _cells(_GAUGE, "scheduler_uptime_seconds", "Age of the scheduler; its counters began with it.")

# --- of a cell: workers and steps -------------------------------------------------------------------------------------

WORKERS = _cells(_GAUGE, "workers", "Workers in use.", "role")
WORKERS_WANTED = _cells(
    _GAUGE, "workers_wanted", "Workers that the autoscaling policy wants, where there is one.", "role"
)
WORKERS_LOST = _cells(
    _COUNTER, "workers_lost_total", "Times that a worker in use was lost or taken out of use.", "role"
)
WORKER_STEPS = _cells(_COUNTER, "worker_steps_total", "Steps answered.", "role")
WORKER_BUSY = _cells(
    _COUNTER,
    "worker_busy_seconds_total",
    "Time of workers in forward passes and sampling. Divided by worker_seconds_total: their utilisation.",
    "role",
)
WORKER_SECONDS = _cells(
    _COUNTER,
    "worker_seconds_total",
    "Time of workers from their first step to their last, times without any unfinished sequence left out.",
    "role",
)
DRAFT_HIDDEN = _cells(
    _COUNTER,
    "draft_hidden_seconds_total",
    "Part of the drafts' worker_busy_seconds_total during which a target was busy too.",
)
REALIGNMENT_SECONDS = _cells(
    _COUNTER, "realignment_seconds_total", "Time of targets that rows of unequal length cost on top."
)
CORE_SECONDS = _cells(_COUNTER, "scheduler_core_seconds_total", "Time that the scheduler core computed.")
ROW_ERRORS = _cells(
    _COUNTER,
    "row_errors_total",
    "Rows that a worker answered otherwise than asked: unknown_sequence, kv_mismatch, out_of_pages, invalid or failed.",
    "status",
)
GROUP_ROWS = _cells(_HISTOGRAM, "verify_group_rows", "Rows of verify groups, the group size.")
GROUPS = _cells(
    _COUNTER,
    "verify_groups_total",
    "Verify groups by shape: single (one row), equal_length (two rows or more of one length) or ragged.",
    "shape",
)
REALIGNED_ROWS = _cells(_COUNTER, "realigned_rows_total", "Rows of ragged verify groups.")
WAIT_BOUND_HITS = _cells(
    _COUNTER, "wait_bound_hits_total", "Verify groups of the oldest rows because one had waited as long as it may."
)

# --- of a cell: speculation -------------------------------------------------------------------------------------------

NUM_DRAFTS = _cells(_COUNTER, "spec_decode_num_drafts_total", "Rounds with a draft.")
NUM_DRAFT_TOKENS = _cells(_COUNTER, "spec_decode_num_draft_tokens_total", "Tokens proposed and verified.")
NUM_ACCEPTED_TOKENS = _cells(
    _COUNTER, "spec_decode_num_accepted_tokens_total", "Proposed tokens that were accepted and became output."
)
ACCEPTED_PER_POSITION = _cells(
    _COUNTER,
    "spec_decode_num_accepted_tokens_per_pos_total",
    "Accepted tokens by their position in the proposal, from 0 on; the last position, 15, stands for all beyond.",
    "position",
)
ACCEPTED_LENGTH = _cells(_HISTOGRAM, "spec_decode_accepted_length", "Accepted tokens of rounds with a draft.")
DRAFT_LENGTH = _cells(
    _HISTOGRAM, "spec_decode_draft_length", "Draft length chosen for verified rounds; 0 is plain decoding."
)

# --- of a cell: KV ----------------------------------------------------------------------------------------------------

KV_USAGE = _cells(_GAUGE, "kv_cache_usage_perc", "KV pages in use of all workers, 1 for all of them.")
KV_PAGES = _cells(_GAUGE, "kv_pages", "KV pages that workers in use have.", "role")
KV_PAGES_USED = _cells(_GAUGE, "kv_pages_used", "KV pages set aside for sequences.", "role")
PREFIX_QUERIES = _cells(
    _COUNTER, "prefix_cache_queries_total", "Positions of sequences when they were opened at a worker.", "role"
)
PREFIX_HITS = _cells(
    _COUNTER, "prefix_cache_hits_total", "Positions whose KV was taken over from other sequences.", "role"
)
KV_MOVES = _cells(
    _COUNTER,
    "kv_moves_total",
    "Sequences that left a draining target: moved with their KV, failed to, or rehomed without it because that was "
    "sooner.",
    "outcome",
)
KV_MOVE_POSITIONS = _cells(_COUNTER, "kv_move_positions_total", "Positions whose KV was moved.")
KV_MOVE_BYTES = _cells(_COUNTER, "kv_move_bytes_total", "Bytes of KV moved.")
KV_MOVE_SECONDS = _cells(_COUNTER, "kv_move_seconds_total", "Time that moves of KV took that got through.")

CATALOGUE: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order in which they stand above."""


def markdown_table(owner: Owner) -> str:
    """As docs/metrics.md has it."""
    lines = ["| name | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in CATALOGUE:
        if metric.owner is owner:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.meaning} |")
    return "\n".join(lines)
