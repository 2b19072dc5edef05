from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from scheduler.messages import Role
from services.backend import LoadFigures, PrefixFigures
from services.gateway.metrics import GatewayMetrics


def samples(metrics: GatewayMetrics, load: LoadFigures | None) -> dict[tuple[str, str | None], float]:
    families = text_string_to_metric_families(metrics.exposition(load).decode())
    return {(each.name, each.labels.get("role")): each.value for family in families for each in family.samples}


def test_prefix_counters_are_the_schedulers() -> None:
    metrics = GatewayMetrics()
    for queries, hits in ((100, 60), (250, 200)):
        figures = PrefixFigures(Role.TARGET, queries, hits), PrefixFigures(Role.DRAFT, queries, 0)
        found = samples(metrics, LoadFigures(0, 0, (), figures))
        assert found["spool_prefix_cache_queries_total", "target"] == queries
        assert found["spool_prefix_cache_hits_total", "target"] == hits
        assert found["spool_prefix_cache_hits_total", "draft"] == 0
    assert not [name for name, _ in samples(metrics, None) if "prefix" in name]
