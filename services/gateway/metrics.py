"""What a gateway counts, under the names that dashboards of other servers know."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from protos import scheduler_pb2
from services import metric_catalogue as catalogue
from services.gateway.errors import ErrorKind
from services.metric_catalogue import Metric
from services.scheduler_families import scheduler_families

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40)
_LATENCY_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400, 800, 1600)

# prometheus_client tells when each counter began beside it.
_BEGINNING = "_created"


class GatewayMetrics:
    """Counters of one gateway in a registry of its own.

    `requests` here are sequences, one for each choice of each prompt, as elsewhere.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._prompt = self._counter(catalogue.PROMPT_TOKENS)
        self._generated = self._counter(catalogue.GENERATION_TOKENS)
        self._drafted = self._counter(catalogue.DELIVERED_DRAFT_TOKENS)
        self._accepted = self._counter(catalogue.DELIVERED_ACCEPTED_TOKENS)
        self._success = self._counter(catalogue.REQUEST_SUCCESS)
        self._failure = self._counter(catalogue.REQUEST_FAILURE)
        self._first_token = self._histogram(catalogue.TIME_TO_FIRST_TOKEN, _FIRST_TOKEN_BUCKETS)
        self._between = self._histogram(catalogue.INTER_TOKEN_LATENCY, _TOKEN_BUCKETS)
        self._per_token = self._histogram(catalogue.TIME_PER_OUTPUT_TOKEN, _TOKEN_BUCKETS)
        self._latency = self._histogram(catalogue.E2E_LATENCY, _LATENCY_BUCKETS)
        self._session_breaks = self._counter(catalogue.SESSION_BREAKS)
        self._resubmissions = self._counter(catalogue.RESUBMISSIONS)
        self._scheduler_up = Gauge(catalogue.SCHEDULER_UP.family, catalogue.SCHEDULER_UP.help, registry=self._registry)

    def prompt(self, tokens: int) -> None:
        self._prompt.inc(tokens)

    def sequence(self, arrived: float) -> SequenceMeter:
        """`arrived` is of `time.perf_counter`."""
        return SequenceMeter(self, arrived)

    def failed(self, kind: ErrorKind) -> None:
        self._failure.labels(kind.value).inc()

    def session_opened(self) -> None:
        self.scheduler_answers(True)

    def session_broke(self) -> None:
        self.scheduler_answers(False)
        self._session_breaks.inc()

    def resubmitted(self, sequences: int) -> None:
        self._resubmissions.inc(sequences)

    def scheduler_answers(self, answers: bool) -> None:
        self._scheduler_up.set(answers)

    def families(self) -> Iterator[Family]:
        """What this gateway counts itself."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith(_BEGINNING)]
            yield family

    def exposition(self, status: scheduler_pb2.StatusReply | None) -> bytes:
        """All of it and the scheduler's own, in Prometheus' text form. `status` is None while it cannot be asked."""
        self.scheduler_answers(status is not None)
        return generate_latest(_Families(chain(self.families(), scheduler_families(status))))

    # For SequenceMeter.

    def observe_round(self, tokens: int, drafted: int, accepted: int) -> None:
        self._generated.inc(tokens)
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_pause(self, seconds: float) -> None:
        self._between.observe(seconds)

    def observe_pace(self, seconds_per_token: float) -> None:
        self._per_token.observe(seconds_per_token)

    def observe_end(self, reason: str, seconds: float) -> None:
        self._success.labels(reason).inc()
        self._latency.observe(seconds)

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.family, metric.help, metric.labels, registry=self._registry)

    def _histogram(self, metric: Metric, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(metric.family, metric.help, metric.labels, buckets=buckets, registry=self._registry)


class _Families(Collector):
    """Families in the place of a registry."""

    def __init__(self, families: Iterator[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        return self._families


class SequenceMeter:
    """Follows one sequence. The first end counts."""

    def __init__(self, metrics: GatewayMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._first: float | None = None
        self._last = arrived
        self._later_tokens = 0
        self._ended = False

    def round(self, tokens: int, drafted: int, accepted: int) -> None:
        now = time.perf_counter()
        if self._first is None:
            self._first = now
            self._metrics.observe_first_token(now - self._arrived)
        else:
            self._later_tokens += tokens
            self._metrics.observe_pause(now - self._last)
        self._last = now
        self._metrics.observe_round(tokens, drafted, accepted)

    def finished(self, reason: str) -> None:
        if not self._ended and self._first is not None and self._later_tokens:
            self._metrics.observe_pace((self._last - self._first) / self._later_tokens)
        self._end(reason)

    def aborted(self) -> None:
        """The client went away, or another choice of its request failed."""
        self._end("abort")

    def failed(self) -> None:
        self._end("error")

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._metrics.observe_end(reason, time.perf_counter() - self._arrived)
