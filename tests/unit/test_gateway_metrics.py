"""What a gateway exports: names as documented, and the scheduler's figures as it said them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from protos import scheduler_pb2, worker_pb2
from services.gateway import metrics as gateway_metrics
from services.gateway.errors import ErrorKind
from services.gateway.metrics import GatewayMetrics
from services.metric_catalogue import CATALOGUE, Kind, Owner

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"\| `(spool_\w+)` \| (\w+) \| (.*?) ?\| (.+) \|")
STATUS = scheduler_pb2.StatusReply(
    uptime_seconds=12.5,
    sessions=2,
    workers=[
        scheduler_pb2.WorkerStatus(role=role, state=state, total_pages=total, free_pages=free)
        for role, state, total, free in (
            (worker_pb2.ROLE_TARGET, scheduler_pb2.WORKER_STATE_IN_USE, 100, 40),
            (worker_pb2.ROLE_TARGET, scheduler_pb2.WORKER_STATE_IN_USE, 50, 50),
            (worker_pb2.ROLE_TARGET, scheduler_pb2.WORKER_STATE_UNREACHABLE, 70, 0),
            (worker_pb2.ROLE_DRAFT, scheduler_pb2.WORKER_STATE_IN_USE, 50, 30),
        )
    ],
    pool=scheduler_pb2.PoolFigures(pool=9, waiting=3, window=6, drafting=4, verifying=2, window_limit=6, queue_limit=7),
    prefix_cache=[
        scheduler_pb2.PrefixCacheFigures(role=worker_pb2.ROLE_TARGET, queries=250, hits=200),
        scheduler_pb2.PrefixCacheFigures(role=worker_pb2.ROLE_DRAFT, queries=250),
    ],
    kv_moves=scheduler_pb2.KvMoveFigures(moves=3, positions=90, bytes=4096, seconds=0.5, failed=1, rehomed=2),
    throughput=scheduler_pb2.ThroughputFigures(preemptions=4),
    counters=scheduler_pb2.CounterFigures(
        refusals=[scheduler_pb2.LabelledCount(label="queue_full", count=5)],
        accepted_per_position=[7, 2],
        queue_seconds=scheduler_pb2.HistogramFigures(bounds=[0.5, 1], counts=[2, 0, 1], sum=4.25),
        roles=[scheduler_pb2.RoleFigures(role=worker_pb2.ROLE_DRAFT, steps=8, busy_seconds=1.5, seconds=3)],
    ),
)


def families(text: bytes) -> dict[str, Family]:
    """By the name under which they are told of, which a counter's own has no `_total` of."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        found[f"{family.name}_total" if family.type == "counter" else family.name] = family
    return found


def value(text: bytes, name: str, **labels: str) -> float:
    samples = [
        sample
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if (sample.name, sample.labels) == (name, labels)
    ]
    (sample,) = samples
    return sample.value


def used() -> GatewayMetrics:
    """Every figure of the gateway has been counted once."""
    metrics = GatewayMetrics()
    metrics.prompt(3)
    metrics.failed(ErrorKind.INVALID)
    metrics.session_broke()
    metrics.resubmitted(2)
    meter = metrics.sequence(0.0)
    meter.round(1, 0, 0)
    meter.round(3, 4, 2)
    meter.finished("stop")
    return metrics


@pytest.mark.parametrize("status", [STATUS, None])
def test_exactly_the_catalogue_is_exported(status: scheduler_pb2.StatusReply | None) -> None:
    found = families(used().exposition(status))
    assert {name: family.type for name, family in found.items()} == {
        metric.name: metric.kind.value for metric in CATALOGUE
    }
    for metric in CATALOGUE:
        told = found[metric.name]
        assert told.documentation == metric.help
        assert {frozenset(sample.labels) - {"le"} for sample in told.samples} <= {frozenset(metric.labels)}
        if metric.owner is Owner.GATEWAY:
            assert told.samples


def test_the_documentation_lists_exactly_what_is_exported() -> None:
    text = DOCS.read_text(encoding="utf-8")
    gateways, cells = text.split("\n## Of the cell\n")
    for owner, part in ((Owner.GATEWAY, gateways), (Owner.SCHEDULER, cells)):
        documented = [match.groups() for match in ROW.finditer(part)]
        assert documented == [
            (metric.name, metric.kind.value, ", ".join(f"`{label}`" for label in metric.labels), metric.meaning)
            for metric in CATALOGUE
            if metric.owner is owner
        ]
    # Names in the text around the tables are names of the tables.
    suffix = re.compile(r"_(bucket|sum|count)$")
    mentioned = {suffix.sub("", name) for name in re.findall(r"spool_\w*\w", text)} - {"spool_"}
    assert mentioned == {metric.name for metric in CATALOGUE}


def test_names_follow_the_conventions() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert ("never sum" in metric.help) == (metric.owner is Owner.SCHEDULER)
        assert not set(metric.labels) & {"request_id", "sequence_id", "worker_id", "le"}


def test_figures_of_the_scheduler_are_told_as_it_said_them() -> None:
    text = GatewayMetrics().exposition(STATUS)
    assert value(text, "spool_num_requests_running") == 6
    assert value(text, "spool_num_requests_waiting") == 3
    assert value(text, "spool_window_sequences", state="drafting") == 4
    assert value(text, "spool_workers", role="target") == 2
    assert value(text, "spool_kv_pages", role="target") == 150
    assert value(text, "spool_kv_pages_used", role="target") == 60
    assert value(text, "spool_kv_cache_usage_perc") == 80 / 200
    assert value(text, "spool_prefix_cache_hits_total", role="target") == 200
    assert value(text, "spool_prefix_cache_hits_total", role="draft") == 0
    assert value(text, "spool_kv_moves_total", outcome="failed") == 1
    assert value(text, "spool_kv_move_bytes_total") == 4096
    assert value(text, "spool_num_preemptions_total") == 4
    assert value(text, "spool_refusals_total", cause="queue_full") == 5
    assert value(text, "spool_spec_decode_num_accepted_tokens_per_pos_total", position="1") == 2
    assert value(text, "spool_worker_busy_seconds_total", role="draft") == 1.5
    assert value(text, "spool_scheduler_up") == 1


def test_histograms_of_the_scheduler_are_cumulative() -> None:
    text = GatewayMetrics().exposition(STATUS)
    name = "spool_request_queue_time_seconds"
    assert [value(text, f"{name}_bucket", le=bound) for bound in ("0.5", "1.0", "+Inf")] == [2, 2, 3]
    assert value(text, f"{name}_count") == 3
    assert value(text, f"{name}_sum") == 4.25


def test_a_scheduler_that_does_not_answer_has_no_figures() -> None:
    found = families(GatewayMetrics().exposition(None))
    assert found["spool_scheduler_up"].samples[0].value == 0
    cells = [found[metric.name] for metric in CATALOGUE if metric.owner is Owner.SCHEDULER]
    assert [family.name for family in cells if family.samples] == []


def test_paces_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens at 2 s, three at 3 s, one at 5 s: the mean after the first delivery is 3 s for 4 tokens."""
    clock = iter([2.0, 3.0, 5.0, 6.0])
    monkeypatch.setattr(gateway_metrics.time, "perf_counter", lambda: next(clock))
    metrics = GatewayMetrics()
    meter = metrics.sequence(arrived=1.5)
    for tokens in (2, 3, 1):
        meter.round(tokens, 0, 0)
    meter.finished("length")
    meter.aborted()
    text = metrics.exposition(None)
    assert value(text, "spool_time_to_first_token_seconds_sum") == 0.5
    assert value(text, "spool_inter_token_latency_seconds_sum") == 3
    assert value(text, "spool_inter_token_latency_seconds_count") == 2
    assert value(text, "spool_request_time_per_output_token_seconds_sum") == 0.75
    assert value(text, "spool_e2e_request_latency_seconds_sum") == 4.5
    assert value(text, "spool_generation_tokens_total") == 6
    assert value(text, "spool_request_success_total", finished_reason="length") == 1
    assert "abort" not in text.decode().split("# HELP spool_request_failure")[0].split("finished_reason=")[-1]


def test_sessions_say_whether_there_is_a_scheduler() -> None:
    metrics = GatewayMetrics()

    def up() -> float:
        (family,) = [family for family in metrics.families() if family.name == "spool_scheduler_up"]
        return family.samples[0].value

    assert up() == 0
    metrics.session_opened()
    assert up() == 1
    metrics.session_broke()
    assert up() == 0
