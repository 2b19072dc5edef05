"""The scheduler's own /metrics: whom it asks, and what it does about a port that another process has."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import httpx
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family

from services.scheduler.metrics_endpoint import MetricsEndpoint
from tests.support.waiting import LONG, until

HOST = "127.0.0.1"


def one_family() -> Iterator[Family]:
    """Its value is 1 where it is read on the thread of the test, whose event loop the scheduler's would be."""
    family = GaugeMetricFamily("spool_here", "Where it is read.")
    family.add_metric([], float(threading.current_thread() is threading.main_thread()))
    yield family


async def scrape(endpoint: MetricsEndpoint) -> str:
    assert endpoint.url is not None
    async with httpx.AsyncClient(timeout=LONG) as http:
        response = await http.get(endpoint.url)
    assert response.status_code == 200
    return response.text


def test_a_port_in_use_is_taken_when_it_is_free() -> None:
    async def run() -> None:
        other = socket.create_server((HOST, 0))
        port = other.getsockname()[1]
        async with MetricsEndpoint(one_family, HOST, port, retry_seconds=0.02) as endpoint:
            assert endpoint.url is None
            other.close()
            await until(lambda: endpoint.url is not None)
            assert endpoint.url == f"http://{HOST}:{port}/metrics"
            assert "spool_here" in await scrape(endpoint)

    asyncio.run(run())


def test_leaving_while_the_port_is_in_use() -> None:
    async def run() -> None:
        with socket.create_server((HOST, 0)) as other:
            async with MetricsEndpoint(one_family, HOST, other.getsockname()[1]) as endpoint:
                assert endpoint.url is None

    asyncio.run(run())
