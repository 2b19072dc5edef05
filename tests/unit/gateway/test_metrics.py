"""The gateway's metrics. tests/integration/scheduler/test_metrics_counts.py compares them with what clients counted."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spool.services.gateway import metrics as gateway_metrics
from spool.services.gateway.metrics import GatewayMetrics


def value(text: bytes, name: str, **labels: str) -> float:
    samples = [
        sample
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if (sample.name, sample.labels) == (name, labels)
    ]
    (sample,) = samples
    return sample.value


def test_paces_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens at 2 s, three at 3 s, one at 5 s: the mean after the first delivery is 3 s for 4 tokens."""
    clock = iter([1.75, 2.0, 3.0, 5.0, 6.0])
    monkeypatch.setattr(gateway_metrics.time, "perf_counter", lambda: next(clock))
    metrics = GatewayMetrics()
    meter = metrics.sequence(arrived=1.5, prompt_tokens=9)
    for tokens in (2, 3, 1):
        meter.round(tokens, 0, 0)
    meter.finished("length")
    # Submitted at 1.75 s, of which the scheduler's queue took 0.1 s; first tokens at 2 s, the last at 5 s.
    assert meter.phases(0.1) == pytest.approx((0.1, 0.15, 3.0))
    text = metrics.exposition()
    assert value(text, "spool_time_to_first_token_seconds_sum") == 0.5
    assert value(text, "spool_inter_token_latency_seconds_sum") == 3
    assert value(text, "spool_inter_token_latency_seconds_count") == 2
    assert value(text, "spool_request_time_per_output_token_seconds_sum") == 0.75
    assert value(text, "spool_e2e_request_latency_seconds_sum") == 4.5
    assert value(text, "spool_generation_tokens_total") == 6
    assert value(text, "spool_request_success_total", finished_reason="length") == 1
    for what, tokens in (("prompt", 9), ("generation", 6)):
        assert value(text, f"spool_request_{what}_tokens_sum") == tokens
        assert value(text, f"spool_request_{what}_tokens_count") == 1
        assert value(text, f"spool_request_{what}_tokens_bucket", le="5.0") == 0
        assert value(text, f"spool_request_{what}_tokens_bucket", le="10.0") == 1
