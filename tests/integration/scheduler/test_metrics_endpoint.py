"""The scheduler's own /metrics: whom it asks, and what it does about a port that another process has."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family

from services.scheduler.metrics_endpoint import MetricsEndpoint
from tests.support.waiting import LONG, until

HOST = "127.0.0.1"


def one_family() -> Iterator[Family]:
    yield GaugeMetricFamily("spool_here", "A figure.", 1.0)


async def test_a_port_in_use_is_taken_when_it_is_free() -> None:
    other = socket.create_server((HOST, 0))
    port = other.getsockname()[1]
    async with MetricsEndpoint(one_family, HOST, port, retry_seconds=0.02) as endpoint:
        assert endpoint.url is None
        other.close()
        await until(lambda: endpoint.url is not None)
        assert endpoint.url == f"http://{HOST}:{port}/metrics"
        async with httpx.AsyncClient(timeout=LONG) as http:
            assert "spool_here 1.0" in (await http.get(endpoint.url or "")).text


async def test_leaving_while_the_port_is_in_use() -> None:
    with socket.create_server((HOST, 0)) as other:
        async with MetricsEndpoint(one_family, HOST, other.getsockname()[1]) as endpoint:
            assert endpoint.url is None
