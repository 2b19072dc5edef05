"""The scheduler's own /metrics on a port that another process has."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading

import httpx
import pytest
from prometheus_client.core import GaugeMetricFamily

from spool.services.scheduler.metrics_endpoint import MetricsEndpoint
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


async def test_silent_connections_do_not_become_threads_without_end() -> None:
    figures = [GaugeMetricFamily("spool_here", "A figure.", 1.0)]
    async with MetricsEndpoint(lambda: figures, HOST, 0, connection_seconds=0.3) as endpoint:
        assert endpoint.url is not None
        port, before = httpx.URL(endpoint.url).port, threading.active_count()
        silent = [socket.create_connection((HOST, port or 0), LONG) for _ in range(100)]
        await until(lambda: select.select(silent, [], [], 0)[0] != [])  # the first that is refused
        assert threading.active_count() - before <= 16
        for connection in silent:
            assert await asyncio.to_thread(connection.recv, 1) == b""
            connection.close()
        async with httpx.AsyncClient(timeout=LONG) as http:
            assert "spool_here 1.0" in (await http.get(endpoint.url)).text


async def test_connections_that_drip_are_closed_in_time() -> None:
    figures = [GaugeMetricFamily("spool_here", "A figure.", 1.0)]
    async with MetricsEndpoint(lambda: figures, HOST, 0, connection_seconds=0.5) as endpoint:
        assert endpoint.url is not None
        address = (HOST, httpx.URL(endpoint.url).port or 0)
        dripping = [socket.create_connection(address, LONG) for _ in range(16)]

        def all_are_closed() -> bool:
            for connection in dripping:
                with contextlib.suppress(OSError):
                    connection.send(b"G")
            return len(select.select(dripping, [], [], 0)[0]) == len(dripping)

        await until(all_are_closed)
        async with httpx.AsyncClient(timeout=LONG) as http:
            assert "spool_here 1.0" in (await http.get(endpoint.url)).text
        for connection in dripping:
            connection.close()


async def test_a_thread_that_cannot_start_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = [GaugeMetricFamily("spool_here", "A figure.", 1.0)]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with MetricsEndpoint(lambda: figures, HOST, 0) as endpoint:
        assert endpoint.url is not None
        address = (HOST, httpx.URL(endpoint.url).port or 0)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            connections = [socket.create_connection(address, LONG) for _ in range(20)]
            await until(lambda: len(select.select(connections, [], [], 0)[0]) == len(connections))
        async with httpx.AsyncClient(timeout=LONG) as http:
            assert "spool_here 1.0" in (await http.get(endpoint.url)).text
        for connection in connections:
            connection.close()
