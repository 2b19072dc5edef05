"""What a gateway counts, under the names that dashboards of other servers know."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from services.backend import LoadFigures, PrefixFigures
from services.gateway.errors import ErrorKind

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
_LATENCY_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400, 800, 1600)


class GatewayMetrics:
    """Counters of one gateway in a registry of its own.

    `requests` here are sequences, one for each choice of each prompt, as elsewhere.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._running = Gauge("spool_num_requests_running", "Sequences being worked on", registry=registry)
        self._waiting = Gauge("spool_num_requests_waiting", "Sequences waiting for room", registry=registry)
        self._kv_usage = Gauge("spool_kv_cache_usage_perc", "KV pages in use, 1 for all of them", registry=registry)
        self._prompt = Counter("spool_prompt_tokens", "Prompt tokens taken in", registry=registry)
        self._generated = Counter("spool_generation_tokens", "Output tokens delivered", registry=registry)
        self._success = Counter(
            "spool_request_success", "Sequences that came to their end", ["finished_reason"], registry=registry
        )
        self._failure = Counter(
            "spool_request_failure", "Requests refused or failed, by kind of error", ["kind"], registry=registry
        )
        self._first_token = Histogram(
            "spool_time_to_first_token_seconds",
            "From a request's arrival to its first output tokens",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._latency = Histogram(
            "spool_e2e_request_latency_seconds",
            "From a request's arrival to its end",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self._drafts = Counter("spool_spec_decode_num_drafts", "Rounds with a draft", registry=registry)
        self._draft_tokens = Counter("spool_spec_decode_num_draft_tokens", "Tokens proposed", registry=registry)
        self._accepted = Counter(
            "spool_spec_decode_num_accepted_tokens", "Proposed tokens accepted and delivered", registry=registry
        )
        self._prefixes = _PrefixCounters()
        registry.register(self._prefixes)

    def prompt(self, tokens: int) -> None:
        self._prompt.inc(tokens)

    def sequence(self, arrived: float) -> SequenceMeter:
        """`arrived` is of `time.perf_counter`."""
        return SequenceMeter(self, arrived)

    def failed(self, kind: ErrorKind) -> None:
        self._failure.labels(kind.value).inc()

    def exposition(self, load: LoadFigures | None) -> bytes:
        """All of it, in Prometheus' text form; gauges of the scheduler are NaN while it cannot be asked."""
        nothing = float("nan")
        self._running.set(nothing if load is None else load.live_sequences - load.waiting)
        self._waiting.set(nothing if load is None else load.waiting)
        pages = 0 if load is None else load.total_pages
        self._kv_usage.set(nothing if load is None else load.pages_in_use / pages if pages else 0.0)
        self._prefixes.figures = () if load is None else load.prefixes
        return generate_latest(self._registry)

    # For SequenceMeter.

    def observe_round(self, tokens: int, drafted: int, accepted: int) -> None:
        self._generated.inc(tokens)
        if drafted:
            self._drafts.inc()
            self._draft_tokens.inc(drafted)
            self._accepted.inc(accepted)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_end(self, reason: str, seconds: float) -> None:
        self._success.labels(reason).inc()
        self._latency.observe(seconds)


class _PrefixCounters(Collector):
    """Counters that the scheduler keeps; they start again when it does."""

    def __init__(self) -> None:
        self.figures: tuple[PrefixFigures, ...] = ()

    def collect(self) -> Iterator[CounterMetricFamily]:
        queries = CounterMetricFamily(
            "spool_prefix_cache_queries", "Positions of sequences when they were opened at a worker", labels=["role"]
        )
        hits = CounterMetricFamily(
            "spool_prefix_cache_hits", "Positions whose KV was taken over from other sequences", labels=["role"]
        )
        for figures in self.figures:
            queries.add_metric([figures.role.value], figures.queries)
            hits.add_metric([figures.role.value], figures.hits)
        yield queries
        yield hits


class SequenceMeter:
    """Follows one sequence. The first end counts."""

    def __init__(self, metrics: GatewayMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._begun = False
        self._ended = False

    def round(self, tokens: int, drafted: int, accepted: int) -> None:
        if not self._begun:
            self._begun = True
            self._metrics.observe_first_token(time.perf_counter() - self._arrived)
        self._metrics.observe_round(tokens, drafted, accepted)

    def finished(self, reason: str) -> None:
        self._end(reason)

    def aborted(self) -> None:
        """The client went away, or another choice of its request failed."""
        self._end("abort")

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._metrics.observe_end(reason, time.perf_counter() - self._arrived)
