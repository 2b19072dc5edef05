"""Messages between simulated processes are bytes, as on a real wire, and in some schedules odd ones.

The ends of a call write and read with the functions of the generated stubs. In between, in a schedule with a
`WirePlan`, a message gets fields that nobody knows, a step comes twice, or a message ends too early. All of this is
drawn from a generator of its own: what is not touched takes the course that it would take without.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from google.protobuf.message import DecodeError, Message

from tests.sim.cell.plan import WirePlan

UNKNOWN_FIELDS, REPEATED, TRUNCATED = "unknown fields", "message repeated", "message truncated"


class Wire:
    """`struck` counts what was done to messages, by kind; `note` hears of what may change the course of things."""

    def __init__(
        self, plan: WirePlan | None, rng: random.Random, struck: Counter[str], note: Callable[..., None]
    ) -> None:
        self._plan = plan
        self._rng = rng
        self._struck = struck
        self._note = note

    def heal(self) -> None:
        """From here on, what is sent arrives as it was sent."""
        self._plan = None

    def carry(self, message: Message, serialize: Callable[[Any], bytes]) -> bytes:
        """What arrives of a message that is sent now."""
        raw = serialize(message)
        plan = self._plan
        if plan is None:
            return raw
        if self._rng.random() < plan.unknown_fields:
            self._struck[UNKNOWN_FIELDS] += 1
            raw = self._with_unknown_fields(message, raw)
        if self._rng.random() < plan.truncated and self._struck[TRUNCATED] < plan.most_truncated:
            raw = self._truncated(message, raw)
        return raw

    def repeats(self) -> bool:
        """Whether the step that is sent now comes twice."""
        plan = self._plan
        if plan is None or self._rng.random() >= plan.repeated:
            return False
        self._struck[REPEATED] += 1
        self._note("step comes twice")
        return True

    def _with_unknown_fields(self, message: Message, raw: bytes) -> bytes:
        """The message with further fields at any depth, as a later version of the protocol might send it."""
        copy = type(message)()
        copy.ParseFromString(raw)
        for part in list(_parts(copy)):
            if self._rng.random() < 0.5:
                part.MergeFromString(_unknown_field(self._rng))
        return copy.SerializeToString()

    def _truncated(self, message: Message, raw: bytes) -> bytes:
        """Ends within a field. At a field's border it would be another, shorter message, which HTTP/2 never delivers.

        A message without fields stays as it is.
        """
        # As many random numbers for every length: that of a process id differs from run to run.
        place = int(self._rng.random() * len(raw))
        for end in chain(range(place, 0, -1), range(place + 1, len(raw))):
            try:
                type(message)().ParseFromString(raw[:end])
            except DecodeError:
                self._struck[TRUNCATED] += 1
                self._note("message truncated", type(message).__name__)
                return raw[:end]
        return raw


def read_reply(raw: bytes, deserialize: Callable[[bytes], Any]) -> Any:
    """What a client of grpc.aio gets: None in the place of a reply that cannot be read."""
    try:
        return deserialize(raw)
    except DecodeError:
        return None


def _parts(message: Message) -> Iterator[Message]:
    """The message, and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in [value] if isinstance(value, Message) else value:
            yield from _parts(part)


def _unknown_field(rng: random.Random) -> bytes:
    """A field with a number that no message of the protocol has."""
    number, wire_type = rng.randrange(1000, 15000), rng.choice((0, 1, 2, 5))
    content = bytes(rng.getrandbits(8) for _ in range(8))
    tag = _varint(number << 3 | wire_type)
    match wire_type:
        case 0:
            return tag + _varint(int.from_bytes(content))
        case 1:
            return tag + content
        case 2:
            return tag + _varint(len(content)) + content
        case _:
            return tag + content[:4]


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
