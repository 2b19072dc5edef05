"""The scheduler's own /metrics on a port that another process has."""

from __future__ import annotations

import socket

import httpx
from prometheus_client.core import GaugeMetricFamily

from services.scheduler.metrics_endpoint import MetricsEndpoint
from tests.support.waiting import LONG, until

HOST = "127.0.0.1"


async def test_a_port_in_use_is_taken_when_it_is_free() -> None:
    figures = [GaugeMetricFamily("spool_here", "A figure.", 1.0)]
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        async with MetricsEndpoint(lambda: figures, HOST, port) as left_before:
            assert left_before.url is None
        async with MetricsEndpoint(lambda: figures, HOST, port, retry_seconds=0.02) as endpoint:
            assert endpoint.url is None
            other.close()
            await until(lambda: endpoint.url is not None)
            assert endpoint.url == f"http://{HOST}:{port}/metrics"
            async with httpx.AsyncClient(timeout=LONG) as http:
                assert "spool_here 1.0" in (await http.get(endpoint.url)).text
