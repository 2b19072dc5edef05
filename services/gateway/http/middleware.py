"""What happens before every HTTP route: request id, API key, reading the body, watching for the client to leave."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spool.services.gateway.api_keys import ApiKeys, bearer_of_basic
from spool.services.gateway.dashboard.routes import DASHBOARD_PATH
from spool.services.gateway.errors import ErrorKind, RequestError, invalid, note_error
from spool.services.gateway.http.openai_errors import error_response
from spool.services.gateway.http.service_routes import BALANCED_PATH
from spool.services.gateway.metrics import GatewayMetrics
from spool.services.gateway.options import shown
from spool.services.observability.logs import shortened
from spool.services.observability.request_ids import REQUEST_ID, TRACEPARENT, begin_request, note_key, noted_figures

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/ping", BALANCED_PATH)
_METRICS_PATHS = ("/metrics", "/load")
_MONITORED = (*OPEN_PATHS, *_METRICS_PATHS)

# Pages for browsers, which cannot send a bearer's key by themselves. Requests for them have no effect, so a page of
# another site that makes a browser send one gains nothing.
_BROWSED = re.compile(rf"/metrics|{DASHBOARD_PATH}(/.*)?")
_ASK_PERSON = 'Basic realm="Spool: any name, and an API key as the password", charset="UTF-8"'

# Characters in log lines: clients choose them.
_LONGEST_METHOD, _LONGEST_PATH = 16, 200
_SHOWN_HOST = 80

BODY_SECONDS = 30.0
"""In which a client must send a body."""

# Closing the connection while a client still sends resets it, and the client never sees the answer.
_DISCARDED_BYTES = 64 * 1024 * 1024

# Always read: requests of most clients have no more, and all connections together hold little of this size.
_SMALL_BODY = 64 * 1024


class RequestIds:
    """Gives every response the request's x-request-id, or a new one if the request has none of a usable form.

    All log lines of the request carry the id. One line is logged at the end of the request, at debug level for routes
    that monitoring calls all the time.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = begin_request(headers.get(REQUEST_ID, ""), headers.get(TRACEPARENT, ""))
        began = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            figures = {"status": status, "seconds": round(time.perf_counter() - began, 6), **noted_figures()}
            level = logging.DEBUG if _path_of_route(scope) in _MONITORED else logging.INFO
            method, path = shortened(scope["method"], _LONGEST_METHOD), shortened(scope["path"], _LONGEST_PATH)
            logger.log(level, "%s %r", method, path, extra={"figures": figures})


class KeyGate:
    """Requires an API key, except on OPEN_PATHS, and notes the key's name for the request.

    A server without keys trusts whoever is on its machine, which pages in a browser there are too: one whose owner lets
    its name lead to this machine would read answers. So the request must name the server by an address, or by one of
    `known_hosts`, where these are not None.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, metrics: GatewayMetrics, known_hosts: Collection[str] | None
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._known_hosts = known_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and _path_of_route(scope) in OPEN_PATHS):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # There is no route for web sockets.
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        browsed = scope["method"] == "GET" and _BROWSED.fullmatch(_path_of_route(scope)) is not None
        reads = scope["method"] in ("GET", "HEAD") and _path_of_route(scope) in _METRICS_PATHS
        shown = map(bearer_of_basic, headers) if browsed else headers
        try:
            self._check_host(Headers(scope=scope).get("host"))
            note_key(*self._keys.check(*shown, reads_metrics=reads))
        except RequestError as error:
            self._metrics.failed(error.kind)
            response = error_response(error)
            if browsed:
                response.headers.append("www-authenticate", _ASK_PERSON)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, host: str | None) -> None:
        """Raises RequestError. Browsers always say a host."""
        if self._known_hosts is None or host is None:
            return
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if name.removesuffix(".") not in self._known_hosts and not _is_address(name):
            raise invalid(
                f"the host of the request is {host[:_SHOWN_HOST]!r}, must be localhost, an address, or a name in "
                "gateway.allowed_hosts",
                None,
                "unknown_host",
            )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _path_of_route(scope: Scope) -> str:
    """The path as the router sees it, without the prefix that the application is mounted under."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


class _ClientGoneError(Exception):
    pass


class BodyReader:
    """Reads the whole body, of `body_bytes` at most, before the application sees the request.

    Where all bodies together hold more than `held_bytes`, only small ones are read. Cancels the application when the
    client goes away, whether a response has begun or not.
    """

    def __init__(self, app: ASGIApp, body_bytes: int, held_bytes: int, metrics: GatewayMetrics) -> None:
        self._app = app
        self._body_bytes = body_bytes
        self._most_held = held_bytes
        self._held = 0
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(Headers(scope=scope), receive)
        except RequestError as error:
            self._metrics.failed(error.kind)
            note_error(error)
            await error_response(error)(scope, receive, send)
            return
        except _ClientGoneError:
            return
        try:
            await self._run(scope, receive, send, body)
        finally:
            self._held -= len(body)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        """What is returned counts as held. Raises RequestError for a body that is refused, _ClientGoneError if the
        client goes away."""
        limit = self._body_bytes
        length = headers.get("content-length", "")
        if headers.get("expect") and length.isascii() and length.isdigit() and int(length[:20]) > limit:
            # The client waits for an answer before it sends the body.
            raise _too_large(f"{length[:20]} bytes", limit)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                size, more = await self._read_into(body, receive)
            if size > limit:
                raise _too_large(f"more than {limit} bytes" if more else f"{size} bytes", limit)
            encoding = headers.get("content-encoding", "identity")
            if size and encoding.lower() not in ("", "identity"):
                told = f"the body has the content-encoding {shown(encoding)}, must be sent as it is"
                raise invalid(told, "content-encoding")
            return bytes(body)
        except BaseException as error:
            self._held -= len(body)
            if isinstance(error, TimeoutError):
                message = f"the body did not arrive within {BODY_SECONDS:g} s"
                raise RequestError(ErrorKind.SLOW_BODY, message, code="body_timeout") from error
            raise

    async def _read_into(self, body: bytearray, receive: Receive) -> tuple[int, bool]:
        """How many bytes came, and whether more would come. `body` holds those of a body within the limit."""
        size, more = 0, True
        while more and size <= _DISCARDED_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientGoneError
            chunk = message.get("body", b"")
            size += len(chunk)
            more = message.get("more_body", False)
            if size > self._body_bytes:
                self._held -= len(body)
                body.clear()
                continue
            self._held += len(chunk)
            body += chunk
            if size > _SMALL_BODY and self._held > self._most_held:
                told = "the bodies of the requests under way are too large together"
                raise RequestError(ErrorKind.UNAVAILABLE, told, code="too_many_bodies")
        return size, more

    async def _run(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def wait_for_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        async def receive_again() -> Message:
            if unread:
                return unread.pop()
            await asyncio.wait({watcher})
            return {"type": "http.disconnect"}

        watcher = asyncio.create_task(wait_for_disconnect())
        run = asyncio.ensure_future(self._app(scope, receive_again, send))
        try:
            await asyncio.wait({run, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watcher.cancel()
            run.cancel()
            await asyncio.gather(watcher, run, return_exceptions=True)
        if not run.cancelled():
            run.result()


def _too_large(size: str, limit: int) -> RequestError:
    return RequestError(ErrorKind.TOO_LARGE, f"the body has {size}, must have at most {limit}", code="body_too_large")
