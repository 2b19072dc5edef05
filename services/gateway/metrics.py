"""What a gateway counts, under the names that dashboards of other servers know."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric as Family

from spool.services.gateway.errors import ErrorKind
from spool.services.observability.metric_set import Metric, MetricSet, exposition
from spool.services.observability.vllm_names import with_vllm_names
from spool.services.rpc.certificates import RenewedCertificate

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40)
_LATENCY_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400, 800, 1600)
_LENGTH_BUCKETS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))

_READ = """
gauge certificate_expiry_timestamp_seconds certificate_expiry server
    When the certificate that the server shows expires, in seconds since 1970.
"""


class GatewayMetrics:
    """Defines the metrics of one gateway and counts them.

    `requests` here are sequences, one for each choice of each prompt, as elsewhere. With `vllm_model_name`, metrics
    that vLLM has too are exported under vLLM's names as well, for a model of this name.
    """

    def __init__(self, vllm_model_name: str | None = None) -> None:
        self._vllm_model_name = vllm_model_name
        self.certificates: dict[str, RenewedCertificate[Any]] = {}
        """Of the servers that have one, by the server's name."""
        self._set = of = MetricSet[GatewayMetrics](_READ)
        self.success = of.counter(
            "request_success_total",
            "Sequences that came to their end: stop, length, abort (the client left, or another choice failed) or "
            "error.",
            "finished_reason",
        )
        self._failure = of.counter(
            "request_failure_total", "Requests that were refused or failed, by kind of error.", "kind"
        )
        self.prompt = of.counter(
            "prompt_tokens_total",
            "Prompt tokens of sequences that were admitted: a prompt of a request with n = 3 counts three times, as in "
            "request_prompt_tokens.",
        )
        self.generated = of.counter("generation_tokens_total", "Output tokens delivered.")
        self.drafted = of.counter(
            "delivered_draft_tokens_total", "Tokens proposed for delivered output, as responses say in their usage."
        )
        self.accepted = of.counter("delivered_accepted_tokens_total", "Those of them that were accepted and delivered.")
        self.first_token = of.histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to a sequence's first output tokens.",
            _FIRST_TOKEN_BUCKETS,
        )
        self.between = of.histogram(
            "inter_token_latency_seconds",
            "Between two deliveries of tokens of a sequence. One round delivers several tokens, so this is longer than "
            "the time for a token.",
            _TOKEN_BUCKETS,
        )
        self.per_token = of.histogram(
            "request_time_per_output_token_seconds",
            "Mean time for a token after the first delivery, one observation for each sequence that stopped or reached "
            "its length.",
            _TOKEN_BUCKETS,
        )
        self.latency = of.histogram(
            "e2e_request_latency_seconds", "From a request's arrival to a sequence's end.", _LATENCY_BUCKETS
        )
        self.prompt_length = of.histogram(
            "request_prompt_tokens", "Prompt tokens of a sequence, when it came to its end.", _LENGTH_BUCKETS
        )
        self.output_length = of.histogram(
            "request_generation_tokens", "Output tokens of a sequence, when it came to its end.", _LENGTH_BUCKETS
        )
        self._session_breaks = of.counter(
            "scheduler_session_breaks_total",
            "Open sessions with a scheduler that broke; the gateway opens another.",
        )
        self._resubmissions = of.counter(
            "resubmissions_total", "Sequences that went on in another session, with the tokens that they had."
        )
        self._scheduler_up = of.gauge("scheduler_up", "Sessions with schedulers that are open, one for each cell.")

    @property
    def certificate_expiry(self) -> dict[str, float]:
        return {server: certificate.expiry_timestamp() for server, certificate in self.certificates.items()}

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return self._set.metrics

    def families(self) -> Iterator[Family]:
        families = self._set.families(self)
        return families if self._vllm_model_name is None else with_vllm_names(families, self._vllm_model_name)

    def exposition(self) -> bytes:
        """In Prometheus' text form."""
        return exposition(self.families())

    def sequence(self, arrived: float, prompt_tokens: int) -> SequenceMeter:
        """`arrived` is of `time.perf_counter`."""
        return SequenceMeter(self, arrived, prompt_tokens)

    def failed(self, kind: ErrorKind) -> None:
        self._failure.labels(kind.value).inc()

    def session_opened(self) -> None:
        self._scheduler_up.inc()

    def session_broke(self) -> None:
        self._scheduler_up.dec()
        self._session_breaks.inc()

    def resubmitted(self, sequences: int) -> None:
        self._resubmissions.inc(sequences)


class SequenceMeter:
    """Follows one sequence. The first end counts."""

    def __init__(self, metrics: GatewayMetrics, arrived: float, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._submitted = time.perf_counter()
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._first: float | None = None
        self._last = arrived
        self._later_tokens = 0
        self._admitted = False
        self._ended = False

    def admitted(self) -> None:
        if not self._admitted:
            self._admitted = True
            self._metrics.prompt.inc(self._prompt_tokens)

    def round(self, tokens: int, drafted: int, accepted: int) -> None:
        now = time.perf_counter()
        self._tokens += tokens
        if self._first is None:
            self._first = now
            self._metrics.first_token.observe(now - self._arrived)
        else:
            self._later_tokens += tokens
            self._metrics.between.observe(now - self._last)
        self._last = now
        self._metrics.generated.inc(tokens)
        self._metrics.drafted.inc(drafted)
        self._metrics.accepted.inc(accepted)

    def phases(self, queue_seconds: float) -> tuple[float, float, float]:
        """Seconds in the scheduler's queue, from there to the first tokens, and to the last ones."""
        if self._first is None:
            return time.perf_counter() - self._submitted, 0.0, 0.0
        return queue_seconds, self._first - self._submitted - queue_seconds, self._last - self._first

    def finished(self, reason: str) -> None:
        if not self._ended and self._first is not None and self._later_tokens:
            self._metrics.per_token.observe((self._last - self._first) / self._later_tokens)
        self._end(reason)

    def aborted(self) -> None:
        """The client went away, or another choice of its request failed, before or after the admission."""
        self.admitted()
        self._end("abort")

    def failed(self) -> None:
        self._end("error")

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._metrics.success.labels(reason).inc()
            self._metrics.latency.observe(time.perf_counter() - self._arrived)
            self._metrics.prompt_length.observe(self._prompt_tokens)
            self._metrics.output_length.observe(self._tokens)
