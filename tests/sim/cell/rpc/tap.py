"""Where somebody can listen to all messages between simulated processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from google.protobuf.message import Message

if TYPE_CHECKING:
    from tests.sim.cell.process import Process


class TappedCall(Protocol):
    """One call, from its client's request to its end. `server` is None until the call has arrived there."""

    client: Process
    server: Process | None
    address: str
    method: str


class Tap(Protocol):
    """Hears each message twice: where a process hands it over to gRPC, and where another one takes it from there.

    Between the two it may be late, come twice, or get lost. `by_client` says which end of the call it is.
    """

    def wrote(self, call: TappedCall, by_client: bool, message: Message) -> None: ...

    def read(self, call: TappedCall, by_client: bool, message: Message) -> None: ...

    def served(self, call: TappedCall) -> None:
        """The server's handler has ended."""


class NoTap:
    """Nobody listens."""

    def wrote(self, call: Any, by_client: bool, message: Any) -> None:
        return

    def read(self, call: Any, by_client: bool, message: Any) -> None:
        return

    def served(self, call: Any) -> None:
        return
