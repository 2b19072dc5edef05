"""Metrics are exported as they are defined, and named in docs/observability.md."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from spool.services.gateway.metrics import GatewayMetrics
from spool.services.observability.metric_set import MetricSet, exposition
from spool.services.observability.vllm_names import ALIASES, with_vllm_names
from spool.services.scheduler.telemetry.metrics import SchedulerMetrics

DOCS = Path(__file__).parents[3] / "docs" / "observability.md"
GATEWAYS, SCHEDULERS = GatewayMetrics().metrics, SchedulerMetrics().metrics


def test_the_documentation_names_exactly_what_is_exported() -> None:
    named = set(re.findall(r"spool_\w*\w", DOCS.read_text(encoding="utf-8")))
    assert named == {metric.name for metric in (*GATEWAYS, *SCHEDULERS)}


def test_vllms_names_stand_for_metrics_of_ours() -> None:
    assert {f"spool_{name}" for name in ALIASES} <= {metric.name for metric in (*GATEWAYS, *SCHEDULERS)}


def test_an_alias_repeats_type_and_samples_without_labels_that_vllm_lacks() -> None:
    metrics = MetricSet[SimpleNamespace]("counter prefix_cache_hits_total hits role\n Hits.\ngauge queue_limit limit")
    first_token = metrics.histogram("time_to_first_token_seconds", "Wait.", (1.0, 2.0))
    first_token.observe(1.5)
    families = with_vllm_names(
        metrics.families(SimpleNamespace(hits={"draft": 5.0, "target": 7.0}, limit=3.0)), "a/model"
    )
    parsed = {family.name: family for family in text_string_to_metric_families(exposition(families).decode())}
    assert list(parsed) == [
        "spool_prefix_cache_hits",
        "vllm:prefix_cache_hits",
        "spool_queue_limit",
        "spool_time_to_first_token_seconds",
        "vllm:time_to_first_token_seconds",
    ]
    named = {"model_name": "a/model", "engine": "0"}
    hits = parsed["vllm:prefix_cache_hits"]
    assert (hits.type, hits.documentation) == ("counter", "Hits.")
    assert [(one.name, one.labels, one.value) for one in hits.samples] == [("vllm:prefix_cache_hits_total", named, 7.0)]
    assert [one.value for one in parsed["spool_prefix_cache_hits"].samples] == [5.0, 7.0]
    wait = parsed["vllm:time_to_first_token_seconds"]
    assert wait.type == "histogram"
    assert {one.labels["le"]: one.value for one in wait.samples if one.name.endswith("_bucket")} == {
        "1.0": 0,
        "2.0": 1,
        "+Inf": 1,
    }
    assert all(named.items() <= one.labels.items() for one in wait.samples)
