"""What a client may take of a gateway before its request is complete: limits at and beyond, by sockets, while another
client's stream goes on."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import SecretStr

from spool.client.v1 import generation_pb2 as pb
from spool.client.v1.generation_pb2_grpc import GenerationServiceStub
from spool.services.gateway.connections import acceptor, http_protocol
from spool.services.gateway.grpc import server
from spool.services.gateway.http import middleware
from spool.services.gateway.settings import ConnectionLimits, GatewaySettings, TlsFiles
from tests.integration.gateway.expected import TIMEOUT
from tests.support.certificates import issue
from tests.support.gateway import Gateways, Served
from tests.support.waiting import LONG, wait_until

BODY = b'{"prompt": "a", "max_tokens": 2}'
TOKENS = 16
SOON = 0.3


@contextmanager
def attacked(gateways: Gateways, **limits: object) -> Iterator[Served]:
    """A gateway with these limits; the block must leave another client's stream whole."""
    settings = GatewaySettings(connections=ConnectionLimits.model_validate(limits))
    with gateways.serve(settings) as served, streaming(served.url):
        yield served


@contextmanager
def streaming(url: str) -> Iterator[None]:
    began, texts = threading.Event(), list[str]()

    def stream() -> None:
        body = {"prompt": "once", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "logprobs": 0}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LONG) as response:
            for line in response.iter_lines():
                texts.append(line)
                began.set()

    client = threading.Thread(target=stream)
    client.start()
    try:
        assert began.wait(LONG)
        yield
    finally:
        client.join(LONG)
    data = [line.removeprefix("data: ") for line in texts if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    choices = [choice for each in data[:-1] for choice in json.loads(each)["choices"]]
    assert sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"]) == TOKENS


def connected(served: Served) -> socket.socket:
    host, _, port = served.url.rpartition("/")[2].rpartition(":")
    return socket.create_connection((host, int(port)), TIMEOUT)


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of all that comes until the server closes; status 0 where nothing comes."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    if not received:
        return 0, {}, b""
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


def send_all(connection: socket.socket, parts: Iterable[bytes]) -> int:
    """How many bytes, until the server resets the connection."""
    sent = 0
    try:
        for part in parts:
            connection.sendall(part)
            sent += len(part)
    except (ConnectionResetError, BrokenPipeError):
        pass
    return sent


def code(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


def request(*headers: str, path: str = "/ping", method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", *headers, "", ""]).encode()


def of_size(size: int) -> bytes:
    return request(f"x: {'y' * (size - len(request('x: ')))}")


def of_lines(lines: int) -> bytes:
    return request(*["a:b"] * (lines - 2))


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize(
    ("most", "beyond"),
    [
        (of_size(http_protocol.HEADER_BYTES), of_size(http_protocol.HEADER_BYTES + 1)),
        (of_lines(http_protocol.HEADER_LINES), of_lines(http_protocol.HEADER_LINES + 1)),
    ],
    ids=["bytes", "lines"],
)
def test_headers_have_as_many_bytes_and_lines_as_the_limits_say(
    served: Served, most: bytes, beyond: bytes, pieces: int
) -> None:
    for head, expected in ((most, 200), (beyond, 431)):
        with connected(served) as connection:
            for number in range(pieces):
                connection.sendall(head[number * len(head) // pieces : (number + 1) * len(head) // pieces])
            status, headers, body = answer(connection)
            assert (status, headers["connection"]) == (expected, "close")
            assert status == 200 or code(body) == "headers_too_large"


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (b"GET /ping HTTP/1.1\r\nhost: localhost\r\n", b"a:b\r\n" * 10_000),
        (b"GET /ping HTTP/1.1\r\nhost: localhost\r\nx: ", b"y" * 65536),
        (b"GET /", b"y" * 65536),
        (b"GET /ping HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1;", b"y" * 65536),
        (b"GET /ping HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"a:b\r\n" * 10_000),
    ],
    ids=["lines", "value", "path", "chunk extension", "trailers"],
)
def test_what_has_no_end_is_refused(slow: Gateways, first: bytes, again: bytes) -> None:
    with attacked(slow) as served, connected(served) as connection:
        connection.sendall(first)
        sent = send_all(connection, (again for _ in range(60 * 2**20 // len(again))))
        # Beyond the limit: what the system's buffers held, and what was discarded so that the answer is seen.
        assert sent < 20 * 2**20


def test_a_body_has_as_many_chunks_as_the_limit_says(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "BODY_CHUNKS", len(BODY))
    head = request(
        "content-type: application/json", "transfer-encoding: chunked", path="/v1/completions", method="POST"
    )
    for body, expected in ((BODY, 200), (BODY + b" ", 413)):
        with connected(served) as connection:
            connection.sendall(head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\na: b\r\n\r\n")
            status, _, text = answer(connection)
            assert status == expected
            assert status == 200 or code(text) == "too_many_chunks"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", 0),
        (b"GET /ping HTTP/1.1\r\nhost:", 408),
        (b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n", 408),
    ],
    ids=["silent", "headers", "body"],
)
def test_a_request_that_does_not_come_is_not_waited_for(
    slow: Gateways, monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int
) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_SECONDS", SOON)
    monkeypatch.setattr(middleware, "BODY_SECONDS", SOON)
    with attacked(slow) as served, connected(served) as connection:
        connection.sendall(sent)
        assert answer(connection)[0] == status


def test_the_rest_of_a_body_that_is_answered_already_is_not_read_for_ever(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_SECONDS", SOON)
    settings = GatewaySettings(api_keys=(SecretStr("key"),))
    with gateways.serve(settings) as served, connected(served) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
        closed = threading.Event()
        assert send_all(connection, (b" " for _ in range(1000) if not closed.wait(SOON / 30))) < 1000


def test_headers_that_trickle_have_no_more_time(slow: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADER_SECONDS", SOON)
    with attacked(slow) as served, connected(served) as connection:
        head, closed = request(f"x: {'y' * 10_000}"), threading.Event()
        assert send_all(connection, (bytes([byte]) for byte in head if not closed.wait(SOON / 30))) < len(head)


def test_connections_beyond_the_limit_are_refused_and_others_go_on(slow: Gateways) -> None:
    with attacked(slow, total=3) as served:
        silent = [connected(served) for _ in range(2)]
        for _ in range(3):
            with connected(served) as connection:
                connection.sendall(request())
                status, _, body = answer(connection)
                assert (status, code(body)) == (503, "too_many_connections")
        silent[0].sendall(request())
        assert answer(silent[0])[0] == 200
        with connected(served) as connection:
            connection.sendall(request())
            assert answer(connection)[0] == 200
        for connection in silent:
            connection.close()


def test_one_address_has_its_own_limit(gateways: Gateways) -> None:
    with gateways.serve(GatewaySettings(connections=ConnectionLimits(per_address=1))) as served:
        address = ("127.0.0.1", int(served.url.rpartition(":")[2]))
        for client, expected in (("127.0.0.1", 200), ("127.0.0.1", 503), ("127.0.0.2", 200)):
            first = connected(served) if expected == 503 else None
            with socket.create_connection(address, TIMEOUT, (client, 0)) as connection:
                connection.sendall(request())
                assert answer(connection)[0] == expected
            if first is not None:
                first.close()


def test_connections_without_a_request_are_kept_for_longer_than_by_proxies_and_then_closed(gateways: Gateways) -> None:
    assert ConnectionLimits().keep_alive_seconds > 60
    with (
        gateways.serve(GatewaySettings(connections=ConnectionLimits(keep_alive_seconds=SOON))) as served,
        connected(served) as connection,
    ):
        connection.sendall(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert answer(connection)[0] == 200


def test_a_tls_handshake_that_does_not_come_is_not_waited_for(
    gateways: Gateways, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKE_SECONDS", SOON)
    issued = issue(tmp_path, "127.0.0.1")
    tls = TlsFiles(certificate=Path(issued.certificate_file), key=Path(issued.key_file))
    settings = GatewaySettings(connections=ConnectionLimits(total=1))
    context = ssl.create_default_context(cafile=issued.ca_file)
    with gateways.serve(settings, tls=tls) as served:
        with connected(served) as silent, connected(served) as beyond:
            assert answer(beyond)[0] == 0
            assert answer(silent)[0] == 0
        with context.wrap_socket(connected(served), server_hostname="127.0.0.1") as connection:
            connection.sendall(request())
            assert answer(connection)[0] == 200


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_client_that_takes_nothing_of_its_answers_loses_its_place(
    gateways: Gateways, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    monkeypatch.setattr(http_protocol, "WRITE_SECONDS", SOON)
    issued = issue(tmp_path, "127.0.0.1")
    context = ssl.create_default_context(cafile=issued.ca_file)
    tls = TlsFiles(certificate=Path(issued.certificate_file), key=Path(issued.key_file)) if encrypted else None

    def opened() -> socket.socket:
        plain = connected(served)
        return context.wrap_socket(plain, server_hostname="127.0.0.1") if encrypted else plain

    def status() -> int:
        try:
            with opened() as connection:
                connection.sendall(request())
                return answer(connection)[0]
        except OSError:  # of a handshake
            return 0

    limits = ConnectionLimits(total=1)
    with gateways.serve(GatewaySettings(connections=limits), tls=tls) as served, opened() as connection:
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500)
        wait_until(lambda: status() == 200, "a free place")


def test_a_client_that_takes_some_of_its_answer_keeps_its_place(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "WRITE_SECONDS", 1.0)
    asked, part, waiting = 300, 64 * 1024, threading.Event()
    limits = ConnectionLimits(keep_alive_seconds=1)
    with gateways.serve(GatewaySettings(connections=limits)) as served, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, part)
        connection.settimeout(TIMEOUT)
        host, _, port = served.url.rpartition("/")[2].rpartition(":")
        connection.connect((host, int(port)))
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * asked + request())
        received = b""
        for _ in range(30):
            received += connection.recv(part)
            waiting.wait(0.1)
        while more := connection.recv(2**20):
            received += more
    assert received.count(b"HTTP/1.1 200") == asked + 1


JSON = ("content-type: application/json", f"content-length: {len(BODY)}")


def test_an_offer_of_http2_is_answered_by_http1(served: Served) -> None:
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAAAAIAAAAA", *JSON)
    with connected(served) as connection:
        connection.sendall(request(*offer, path="/v1/completions", method="POST") + BODY)
        status, headers, body = answer(connection)
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 2)
    assert "upgrade" not in headers


def test_a_stream_to_an_http10_client_ends_with_its_connection(served: Served) -> None:
    body = b'{"prompt": "a", "max_tokens": 2, "stream": true}'
    head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with connected(served) as connection:
        connection.sendall(head.encode() + body)
        status, headers, text = answer(connection)
    assert (status, headers["connection"], "transfer-encoding" in headers) == (200, "close", False)
    assert text.startswith(b"data: ")
    assert text.endswith(b"data: [DONE]\n\n")


def test_requests_sent_together_are_answered_in_turn(served: Served) -> None:
    first = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n%b\r\n\r\n%b" % ("\r\n".join(JSON).encode(), BODY)
    with connected(served) as connection:
        connection.sendall(first + request(path="http://localhost/v1/models") + request())
        _, _, rest = answer(connection)
    assert rest.count(b"HTTP/1.1 200") == 1  # of the answer to the second request, which asks to close
    assert b'"object":"list"' in rest


def test_empty_lines_before_a_request_are_skipped(served: Served) -> None:
    body = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n%b\r\n\r\n%b" % ("\r\n".join(JSON).encode(), BODY)
    with connected(served) as connection:
        connection.sendall(b"\r\n\n" + body + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n" + request())
        assert answer(connection)[0] == 200
    with connected(served) as connection:
        send_all(connection, (b"\r\n" * 2**12 for _ in range(http_protocol.HEADER_BYTES // 2**12)))
        assert answer(connection)[0] == 431


@pytest.mark.parametrize("target", ["http://[::1", "http://", "*", "localhost:1", "//", "?a=1"])
@pytest.mark.parametrize("method", ["GET", "CONNECT", "HEAD"])
def test_targets_that_are_no_path_are_not_found(served: Served, method: str, target: str) -> None:
    with connected(served) as connection:
        connection.sendall(request(path=target, method=method))
        status, headers, _ = answer(connection)
    assert (status, headers["content-type"]) == (404, "application/json")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /ping HTTP/1.1\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nhost: localhost\r\na b: c\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nx\r\n",
        b"POST /ping HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"\r\n\r\n a",
        b"\rGET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_of_the_same_shape(served: Served, sent: bytes) -> None:
    with connected(served) as connection:
        connection.sendall(sent)
        status, _, body = answer(connection)
    assert (status, code(body)) == (400, "invalid_http")


def test_large_bodies_together_have_a_limit_that_small_ones_do_not_meet(slow: Gateways) -> None:
    def sent(connection: socket.socket, size: int, missing: int = 0) -> None:
        head = ("content-type: application/json", f"content-length: {size}")
        whole = request(*head, path="/v1/completions", method="POST") + BODY.ljust(size)
        connection.sendall(whole[: len(whole) - missing])

    def asked(size: int) -> tuple[int, str]:
        with connected(served) as connection:
            sent(connection, size)
            status, _, body = answer(connection)
        return status, "" if status == 200 else code(body)

    with attacked(slow, held_body_bytes=2**20) as served:
        small = [connected(served) for _ in range(17)]
        for connection in small:
            sent(connection, 64_000, missing=1)
        wait_until(lambda: asked(70_000) == (503, "too_many_bodies"), "the small bodies are held")
        assert asked(64_000) == (200, "")
        for connection in small:
            connection.sendall(b" ")
            assert answer(connection)[0] == 200
        wait_until(lambda: asked(400_000) == (200, ""), "nothing is held any more")


def test_a_line_of_the_log_has_little_of_what_a_client_chose(
    gateways: Gateways, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "spool.services")
    key = GatewaySettings(api_keys=(SecretStr("key"),))
    with gateways.serve(key) as served:
        for text in (request(path=f"/{'y' * 60_000}"), request(method="Y" * 60_000, path="/v1"), of_size(60_000)):
            with connected(served) as connection:
                connection.sendall(text)
                status, _, body = answer(connection)
                assert status in (200, 401, 405)
                assert len(body) < 1000
    assert len(caplog.messages) >= 2
    assert len(caplog.text) < 2000


def channel_to(served: Served) -> grpc.Channel:
    """With connections of its own."""
    return grpc.insecure_channel(served.address, [("grpc.use_local_subchannel_pool", 1)])


def checked(channel: grpc.Channel, **call: Any) -> grpc.StatusCode:
    try:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), **call)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_a_call_has_as_many_bytes_of_metadata_as_the_limit_says(slow: Gateways) -> None:
    most, own = server.METADATA_BYTES, 1024  # calls have some without being asked to
    with attacked(slow) as served, channel_to(served) as channel:
        assert checked(channel, metadata=[("x", "y" * (most - own))]) is grpc.StatusCode.OK
        for beyond in (most, 60 * 2**20):
            assert checked(channel, metadata=[("x", "y" * beyond)]) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_grpc_connections_beyond_the_limit_are_closed_and_others_go_on(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", SOON)
    limits = ConnectionLimits(grpc_total=2)
    with gateways.serve(GatewaySettings(connections=limits)) as served, channel_to(served) as first:
        host, _, port = served.address.rpartition(":")
        assert checked(first) is grpc.StatusCode.OK
        with socket.create_connection((host, int(port)), TIMEOUT) as silent:
            with channel_to(served) as channel:
                assert checked(channel) is grpc.StatusCode.UNAVAILABLE
            assert checked(first) is grpc.StatusCode.OK
            while silent.recv(65536):  # the settings of HTTP/2
                pass
        with channel_to(served) as channel:
            wait_until(lambda: checked(channel) is grpc.StatusCode.OK, "a free place")


def test_calls_of_a_connection_beyond_the_limit_wait(slow: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STREAMS", 1)
    with slow.serve() as served, channel_to(served) as channel, channel_to(served) as other:
        stream = GenerationServiceStub(channel).GenerateStream(pb.GenerateRequest(text="once", ignore_eos=True))
        next(stream)
        assert checked(channel, timeout=SOON) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert checked(other) is grpc.StatusCode.OK
        stream.cancel()
        assert checked(channel) is grpc.StatusCode.OK


PROGRAM = """
import asyncio, resource, sys
from spool.services.gateway.http.server import HttpServer
from spool.services.gateway.settings import ListenSettings
from spool.services.observability.logs import LogFormat, install_logs

async def app(scope, receive, send):
    files = []
    if scope["path"] == "/exhaust":
        try:
            while True:
                files.append(open("/dev/null"))
        except OSError:
            asyncio.get_running_loop().call_later(1, lambda: [file.close() for file in files])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 160))
    async with HttpServer(app, ListenSettings()) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)

install_logs(LogFormat.TEXT, 20)
asyncio.run(main())
"""


def test_connections_leave_descriptors_for_others_and_wait_where_none_is_left() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        served = Served(program.stdout.readline().strip(), "")

        def status(path: str) -> int:
            with connected(served) as connection:
                connection.sendall(request(path=path))
                return answer(connection)[0]

        silent = [connected(served) for _ in range(160)]
        assert status("/") == 503
        for connection in silent:
            connection.close()
        wait_until(lambda: status("/") == 200, "a free place")
        assert status("/exhaust") == 200
        assert status("/") == 200
        _, logged = program.communicate(timeout=LONG)
    refused, waited = logged.splitlines()
    assert "connections were refused" in refused
    assert "connections wait: Too many open files" in waited
