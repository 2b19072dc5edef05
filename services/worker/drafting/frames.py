"""The messages of a stream as frames over plain TCP: four bytes of length, and so many of message.

gRPC in Python costs about twice as much for an exchange. Its call lets the target in, tells it the port and a secret,
and stays open: whoever loses it closes the connection, and it has the reason.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue

from google.protobuf.message import Message

from spool.protos import draft_pb2
from spool.services.worker.drafting.limits import MAX_FRAME_BYTES, check_at_most

FRAMES_METADATA_KEY = "spool-frames"
"""Of the initial metadata of a call; its value is the port and the secret, in hexadecimal, with a space between."""
SECRET_BYTES = 16
WELCOME = bytes(4)
"""What the draft worker answers to the secret: an empty frame."""


def frame_of(message: Message) -> bytes:
    data = message.SerializeToString()
    return len(data).to_bytes(4, "big") + data


def size_of(header: bytes) -> int:
    """Raises BadMessageError for a frame that is too long."""
    size = int.from_bytes(header, "big")
    check_at_most("the length of a frame", size, MAX_FRAME_BYTES, "RESOURCE_EXHAUSTED")
    return size


class FrameConnection:
    """A target's end. `send` is called on one thread and never blocks; `messages` is read on another one."""

    def __init__(self, address: str, offered: str, timeout_seconds: float) -> None:
        """`address` is that of the gRPC call, `offered` what its metadata says. Raises OSError and ValueError."""
        port, _, secret = offered.partition(" ")
        host = address.rpartition(":")[0].strip("[]")
        self._socket = socket.create_connection((host, int(port)), timeout_seconds)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(bytes.fromhex(secret))
            self._reader = self._socket.makefile("rb")
            if self._reader.read(len(WELCOME)) != WELCOME:
                raise OSError(f"{host}:{port} does not know the secret")
            self._socket.settimeout(None)
        except BaseException:
            self._socket.close()
            raise
        self._unsent: SimpleQueue[bytes | None] = SimpleQueue()
        # Each is written by one thread only.
        self._queued = self._sent = 0
        threading.Thread(target=self._send_unsent, name="draft-frames", daemon=True).start()

    @property
    def unsent(self) -> int:
        """Frames that wait for room on the way, the one that is being sent included."""
        return self._queued - self._sent

    def send(self, message: Message) -> None:
        """Where the connection is broken, `messages` ends."""
        frame = frame_of(message)
        if not self.unsent:
            with suppress(OSError):
                frame = frame[self._socket.send(frame, socket.MSG_DONTWAIT) :]
        if frame:
            self._queued += 1
            self._unsent.put(frame)

    def messages(self) -> Iterator[draft_pb2.Proposals]:
        """Until the connection ends. Raises BadMessageError, DecodeError and OSError."""
        while len(header := self._reader.read(4)) == 4:
            size = size_of(header)
            if len(data := self._reader.read(size)) < size:
                return
            yield draft_pb2.Proposals.FromString(data)

    def close(self) -> None:
        """On whichever thread; `messages` ends then."""
        self._unsent.put(None)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Once `messages` has ended."""
        self.close()
        self._reader.close()
        self._socket.close()

    def _send_unsent(self) -> None:
        """Only this thread sends while frames wait, so that they keep their order."""
        with suppress(OSError):
            for frame in iter(self._unsent.get, None):
                self._socket.sendall(frame)
                self._sent += 1
