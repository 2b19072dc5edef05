"""A scheduler's status as metric families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.utils import floatToGoString

from protos import scheduler_pb2
from scheduler.messages import Role
from services import metric_catalogue as catalogue
from services.metric_catalogue import Kind, Metric
from services.wire import role_from_wire

_WINDOW_STATES = ("prefilling", "drafting", "drafted", "verifying", "moving")


def scheduler_families(status: scheduler_pb2.StatusReply | None) -> Iterator[Family]:
    """Every family of the catalogue that is a scheduler's; without samples where there is no status."""
    if status is None:
        for metric in catalogue.CATALOGUE:
            if metric.owner is catalogue.Owner.SCHEDULER:
                yield _histogram(metric, None) if metric.kind is Kind.HISTOGRAM else _family(metric, {})
        return
    yield from _pool(status)
    yield from _workers(status)
    yield from _speculation(status.counters)
    yield from _kv(status)


def _pool(status: scheduler_pb2.StatusReply) -> Iterator[Family]:
    pool, counters = status.pool, status.counters
    yield _one(catalogue.RUNNING, pool.pool - pool.waiting)
    yield _one(catalogue.WAITING, pool.waiting)
    yield _one(catalogue.POOL, pool.pool)
    yield _family(catalogue.WINDOW, {(state,): getattr(pool, state) for state in _WINDOW_STATES})
    yield _one(catalogue.WINDOW_LIMIT, pool.window_limit)
    yield _one(catalogue.QUEUE_LIMIT, pool.queue_limit)
    yield _labelled(catalogue.SEQUENCES, counters.sequences)
    yield _labelled(catalogue.REFUSALS, counters.refusals)
    yield _histogram(catalogue.QUEUE_TIME, counters.queue_seconds)
    yield _one(catalogue.PREEMPTIONS, status.throughput.preemptions)
    yield _labelled(catalogue.RECOVERIES, counters.recoveries)
    yield _one(catalogue.LEASE_EXPIRIES, counters.lease_expiries)
    yield _one(catalogue.GATEWAY_SESSIONS, status.sessions)
    yield _one(catalogue.SCHEDULER_UPTIME, status.uptime_seconds)


def _workers(status: scheduler_pb2.StatusReply) -> Iterator[Family]:
    counters, in_use = status.counters, _in_use(status)
    roles: dict[tuple[str, ...], scheduler_pb2.RoleFigures] = {
        (role_from_wire(figures.role).value,): figures for figures in counters.roles
    }
    yield _family(catalogue.WORKERS, {(role.value,): len(in_use[role]) for role in Role})
    wanted: dict[tuple[str, ...], int] = {
        (role_from_wire(group.role).value,): group.replicas for group in status.replicas.wanted
    }
    yield _family(catalogue.WORKERS_WANTED, wanted)
    yield _family(catalogue.WORKERS_LOST, {role: figures.workers_lost for role, figures in roles.items()})
    yield _family(catalogue.WORKER_STEPS, {role: figures.steps for role, figures in roles.items()})
    yield _family(catalogue.WORKER_BUSY, {role: figures.busy_seconds for role, figures in roles.items()})
    yield _family(catalogue.WORKER_SECONDS, {role: figures.seconds for role, figures in roles.items()})
    yield _one(catalogue.DRAFT_HIDDEN, counters.draft_hidden_seconds)
    yield _one(catalogue.REALIGNMENT_SECONDS, counters.realignment_seconds)
    yield _one(catalogue.CORE_SECONDS, counters.core_seconds)
    yield _labelled(catalogue.ROW_ERRORS, counters.row_errors)
    yield _histogram(catalogue.GROUP_ROWS, counters.group_rows)
    yield _labelled(catalogue.GROUPS, counters.groups)
    yield _one(catalogue.REALIGNED_ROWS, counters.realigned_rows)
    yield _one(catalogue.WAIT_BOUND_HITS, counters.wait_bound_hits)


def _speculation(counters: scheduler_pb2.CounterFigures) -> Iterator[Family]:
    yield _one(catalogue.NUM_DRAFTS, counters.drafts)
    yield _one(catalogue.NUM_DRAFT_TOKENS, counters.draft_tokens)
    yield _one(catalogue.NUM_ACCEPTED_TOKENS, counters.accepted_tokens)
    yield _family(
        catalogue.ACCEPTED_PER_POSITION,
        {(str(position),): count for position, count in enumerate(counters.accepted_per_position)},
    )
    yield _histogram(catalogue.ACCEPTED_LENGTH, counters.accepted_length)
    yield _histogram(catalogue.DRAFT_LENGTH, counters.draft_length)


def _kv(status: scheduler_pb2.StatusReply) -> Iterator[Family]:
    in_use, moves = _in_use(status), status.kv_moves
    pages = {role: sum(worker.total_pages for worker in in_use[role]) for role in Role}
    used = {role: sum(worker.total_pages - worker.free_pages for worker in in_use[role]) for role in Role}
    whole = sum(pages.values())
    yield _one(catalogue.KV_USAGE, sum(used.values()) / whole if whole else 0.0)
    yield _family(catalogue.KV_PAGES, {(role.value,): count for role, count in pages.items()})
    yield _family(catalogue.KV_PAGES_USED, {(role.value,): count for role, count in used.items()})
    prefixes: dict[tuple[str, ...], scheduler_pb2.PrefixCacheFigures] = {
        (role_from_wire(figures.role).value,): figures for figures in status.prefix_cache
    }
    yield _family(catalogue.PREFIX_QUERIES, {role: figures.queries for role, figures in prefixes.items()})
    yield _family(catalogue.PREFIX_HITS, {role: figures.hits for role, figures in prefixes.items()})
    outcomes = {"moved": moves.moves, "failed": moves.failed, "rehomed": moves.rehomed}
    yield _family(catalogue.KV_MOVES, {(outcome,): count for outcome, count in outcomes.items()})
    yield _one(catalogue.KV_MOVE_POSITIONS, moves.positions)
    yield _one(catalogue.KV_MOVE_BYTES, moves.bytes)
    yield _one(catalogue.KV_MOVE_SECONDS, moves.seconds)


def _in_use(status: scheduler_pb2.StatusReply) -> dict[Role, list[scheduler_pb2.WorkerStatus]]:
    workers: dict[Role, list[scheduler_pb2.WorkerStatus]] = {role: [] for role in Role}
    for worker in status.workers:
        if worker.state == scheduler_pb2.WORKER_STATE_IN_USE:
            workers[role_from_wire(worker.role)].append(worker)
    return workers


def _one(metric: Metric, value: float) -> Family:
    return _family(metric, {(): value})


def _labelled(metric: Metric, counts: Iterable[scheduler_pb2.LabelledCount]) -> Family:
    return _family(metric, {(count.label,): count.count for count in counts})


def _family(metric: Metric, samples: Mapping[tuple[str, ...], float]) -> Family:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.family, metric.help, labels=metric.labels)
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family


def _histogram(metric: Metric, figures: scheduler_pb2.HistogramFigures | None) -> Family:
    family = HistogramMetricFamily(metric.family, metric.help, labels=metric.labels)
    if figures is not None and figures.counts:
        buckets, below = [], 0
        for bound, count in zip([*figures.bounds, float("inf")], figures.counts, strict=True):
            below += count
            buckets.append((floatToGoString(bound), below))
        family.add_metric([], buckets, figures.sum)
    return family
