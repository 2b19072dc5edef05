"""A TCP connection that can be cut, or fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TcpProxy:
    """Forwards connections to the server at `behind`, both ways."""

    def __init__(self, behind: str) -> None:
        self._behind = behind
        self._open: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.address = ""
        self.connections = 0

    def cut(self) -> int:
        """Resets every connection; new ones are accepted. Returns how many connections there were."""
        cut = len(self._open) // 2
        for writer in self._open:
            writer.transport.abort()
        return cut

    def lead_to(self, behind: str) -> None:
        """New connections go to the server at `behind`."""
        self._behind = behind

    def hold(self) -> None:
        """Stops the flow on all connections without closing them."""
        self._flowing.clear()

    def release(self) -> None:
        self._flowing.set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        try:
            yield
        finally:
            server.close()
            self.cut()
            for pump in list(self._pumps):
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._behind.rpartition(":")
        try:
            other_reader, other_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self.connections += 1
        for source, sink in ((reader, other_writer), (other_reader, writer)):
            self._open.add(sink)
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while chunk := await source.read(1 << 16):
                await self._flowing.wait()
                sink.write(chunk)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.transport.abort()
            self._open.discard(sink)


@asynccontextmanager
async def tcp_proxy(behind: str) -> AsyncIterator[TcpProxy]:
    proxy = TcpProxy(behind)
    async with proxy.listening():
        yield proxy
