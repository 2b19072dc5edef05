"""Clients that go away while their text is written."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import pytest

from tests.integration.gateway.expected import ENDLESS, PROMPT, THREE, TIMEOUT
from tests.support.gateway import MODEL, Gateways, Served
from tests.support.waiting import wait_until


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_away_frees_everything(slow: Gateways, slowly_served: Served, stream: bool) -> None:
    body = json.dumps({**THREE, "stream": stream}).encode()
    host, port = slowly_served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        load = f"{slowly_served.url}/load"
        wait_until(lambda: httpx.get(load, timeout=TIMEOUT).json()["server_load"] == 3, "three sequences")
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    slow.wait_until_idle()


def test_closing_the_openai_stream_frees_everything(slow: Gateways, slowly_served: Served) -> None:
    with openai.OpenAI(base_url=f"{slowly_served.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"ignore_eos": True, "spool": {"speculation": False}}
        stream = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=ENDLESS["max_tokens"], stream=True, extra_body=extra
        )
        next(iter(stream))
        stream.close()
    slow.wait_until_idle()


def test_many_cancelled_at_any_moment(slow: Gateways, slowly_served: Served) -> None:
    host, port = slowly_served.url.removeprefix("http://").split(":")

    def cancel(number: int) -> None:
        body = json.dumps({**THREE, "stream": number % 2 == 0}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall((f"{head}\r\n\r\n".encode() + body)[: None if number % 5 else -1])
            end = time.monotonic() + number % 7 * 0.01
            while (left := end - time.monotonic()) > 0:
                connection.settimeout(left)
                with suppress(TimeoutError):
                    connection.recv(65536)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(cancel, range(100)))
    slow.wait_until_idle()
