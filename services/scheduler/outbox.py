"""Events of a session that its gateway has not read yet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from protos import scheduler_pb2
from scheduler.messages import FinishReason, Suspicion
from services.backend.sequence_stream import DeltaBuffer, TokenDelta
from services.backend.session_codec import write_delta, write_end
from services.rpc.conversion import to_wire

# Limits of one reply. With log probabilities, a token takes some hundred bytes.
_EVENTS_PER_REPLY = 1024
_TOKENS_PER_REPLY = 16384


@dataclass(slots=True)
class _Pending:
    admitted: bool = False
    deltas: DeltaBuffer = field(default_factory=DeltaBuffer)
    suspicion: Suspicion | None = None
    outcome: FinishReason | Exception | None = None
    retry_after: float = 0.0


class SessionOutbox:
    """Holds at most one pending event for each sequence; later news of the sequence is merged into that event.

    Events are taken in the order in which they became pending. `room` is set while fewer than `limit` events are
    pending.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pending: dict[int, _Pending] = {}
        self._ready = asyncio.Event()
        self.room = asyncio.Event()
        self.room.set()

    def admitted(self, request_id: int) -> None:
        self._of(request_id).admitted = True

    def push(self, request_id: int, delta: TokenDelta) -> None:
        self._of(request_id).deltas.add(delta)

    def suspect(self, request_id: int, suspicion: Suspicion) -> None:
        self._of(request_id).suspicion = suspicion

    def end(self, request_id: int, outcome: FinishReason | Exception, retry_after: float = 0.0) -> None:
        pending = self._of(request_id)
        pending.outcome = outcome
        pending.retry_after = retry_after

    def wake(self) -> None:
        """Ends a `wait` even though no event is pending."""
        self._ready.set()

    async def wait(self) -> None:
        """Until an event is pending."""
        await self._ready.wait()

    def take(self) -> list[scheduler_pb2.SequenceEvent]:
        """Removes and returns as many pending events as one reply may hold."""
        events: list[scheduler_pb2.SequenceEvent] = []
        tokens = 0
        while self._pending and len(events) < _EVENTS_PER_REPLY and tokens < _TOKENS_PER_REPLY:
            request_id = next(iter(self._pending))
            pending = self._pending.pop(request_id)
            tokens += len(pending.deltas)
            events.append(_event(request_id, pending))
        self._update()
        return events

    def _of(self, request_id: int) -> _Pending:
        pending = self._pending.get(request_id)
        if pending is None:
            pending = self._pending[request_id] = _Pending()
            self._update()
        return pending

    def _update(self) -> None:
        _set(self._ready, bool(self._pending))
        _set(self.room, len(self._pending) < self._limit)


def _set(event: asyncio.Event, value: bool) -> None:
    if value:
        event.set()
    else:
        event.clear()


def _event(request_id: int, pending: _Pending) -> scheduler_pb2.SequenceEvent:
    event = scheduler_pb2.SequenceEvent(request_id=request_id, admitted=pending.admitted)
    if pending.deltas:
        write_delta(pending.deltas.take(), event)
    if pending.suspicion is not None:
        event.suspicion.CopyFrom(to_wire(scheduler_pb2.Suspicion, pending.suspicion))
    if pending.outcome is not None:
        write_end(pending.outcome, pending.retry_after, event)
    return event
