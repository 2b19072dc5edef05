"""Ports for servers of tests."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

# Below those that the kernel gives to connections, above those of Ray's workers: nobody takes one by chance.
_PORTS = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        while len(sockets) < count:
            one = stack.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("0.0.0.0", random.SystemRandom().choice(_PORTS)))
                sockets.append(one)
        return [one.getsockname()[1] for one in sockets]
