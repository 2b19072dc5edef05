"""A network switch: `python -m tests.hosts.switch NAME...` makes TAP devices of these names and joins them.

It says `ready` when the devices are there. A line `NAME DELAY TO FROM` on its standard input then changes a link: every
frame to or from that device is late by DELAY seconds. Those to it are lost with the probability TO, those from it with
the probability FROM, and nobody is told.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import struct
import sys

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_LONGEST_FRAME = 65536


class Link:
    """A device, and what happens to frames on their way to or from it."""

    def __init__(self, name: str) -> None:
        self.file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
        self.delay = 0.0
        self.lost_to = self.lost_from = 0.0

    def write(self, frame: bytes) -> None:
        try:
            os.write(self.file, frame)
        except OSError:
            return  # the device is full or not up: a frame may be lost


class Switch:
    """Knows where addresses are from the frames that came from there; frames to others go everywhere."""

    def __init__(self, links: list[Link]) -> None:
        self._links = links
        self._places: dict[bytes, Link] = {}

    def carry(self, source: Link) -> None:
        """Takes one frame from this link, if its device is still there."""
        try:
            frame = os.read(source.file, _LONGEST_FRAME)
        except OSError:
            asyncio.get_running_loop().remove_reader(source.file)
            return
        self._places[frame[6:12]] = source
        known = self._places.get(frame[:6])
        for link in [known] if known is not None else self._links:
            if link is source or random.random() < source.lost_from or random.random() < link.lost_to:
                continue
            delay = source.delay + link.delay
            if delay > 0:
                asyncio.get_running_loop().call_later(delay, link.write, frame)
            else:
                link.write(frame)


async def main(names: list[str]) -> None:
    links = {name: Link(name) for name in names}
    switch = Switch(list(links.values()))
    loop = asyncio.get_running_loop()
    for link in links.values():
        loop.add_reader(link.file, switch.carry, link)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *numbers = line.split()
        link = links[name]
        link.delay, link.lost_to, link.lost_from = map(float, numbers)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
