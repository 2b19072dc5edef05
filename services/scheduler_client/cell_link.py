"""A gateway's way to one cell: a session with its scheduler, which may be replaced by another one at any time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from spool.protos import scheduler_pb2
from spool.scheduler.messages import FinishReason, Suspicion
from spool.services.backend.interface import BackendUnavailableError
from spool.services.backend.session_codec import read_end, read_output
from spool.services.receipts.fingerprint import fingerprint_name
from spool.services.rpc.backoff import Backoff
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.rpc.conversion import from_wire
from spool.services.rpc.supervision import SupervisedTask
from spool.services.scheduler_client.cell_choice import CellState
from spool.services.scheduler_client.remote_stream import RemoteStream
from spool.services.scheduler_client.session import (
    ClientSession,
    SchedulerReplacedError,
    SessionBrokenError,
    VersionConflictError,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Times in seconds. Sequences fail when no scheduler was reached for `give_up`.

    `connect_timeout` bounds three things: finding a scheduler's address, opening a session, and a call for the status
    (1.5 s where it is longer).
    During a session, `resolve` is called every `watch_interval` to learn whether another scheduler has taken over.
    `model` waits up to `first_model_timeout` for the first model, and returns a model for `model_age` before it looks
    again. A sequence fails after `max_fruitless_submissions` sessions that broke before its next token, since the
    sequence itself may be what breaks them.
    """

    give_up: float = 30.0
    connect_timeout: float = 5.0
    first_backoff: float = 0.05
    longest_backoff: float = 1.0
    watch_interval: float = 1.0
    model_age: float = 5.0
    first_model_timeout: float = 10.0
    max_fruitless_submissions: int = 8


Resolve = Callable[[], Awaitable[str]]
"""Gives the address of a cell's present scheduler."""


class LinkOwner(Protocol):
    """What a link tells. Calls come from the event loop and must not block."""

    def opened(self, link: CellLink) -> None: ...

    def broke(self, link: CellLink, streams: list[RemoteStream]) -> None:
        """The session is over, and these unfinished streams are with no scheduler now."""

    def load_changed(self, link: CellLink) -> None:
        """The cell has said how it is."""

    def ended(self, link: CellLink, stream: RemoteStream, outcome: FinishReason | Exception) -> None:
        """The scheduler has ended a sequence; its stream is with no scheduler now."""

    def stopped(self, link: CellLink, error: Exception) -> None:
        """Nothing looks for the cell's scheduler any more."""


class CellLink:
    """Keeps a session with the scheduler that `resolve` names, from `start` to `close`, and feeds the streams in it."""

    def __init__(
        self,
        number: int,
        resolve: Resolve,
        owner: LinkOwner,
        *,
        security: ChannelSecurity,
        options: ClientOptions,
        gateway_id: str,
    ) -> None:
        self.number = number
        self.trouble = "no scheduler was reached yet"
        """Why there is no session, where there is none."""
        self._resolve = resolve
        self._owner = owner
        self._security = security
        self._options = options
        self._gateway_id = gateway_id
        self.streams: dict[int, RemoteStream] = {}
        """Those submitted in the open session and unfinished."""
        self._session: ClientSession | None = None
        self._load = scheduler_pb2.CellLoad()
        self._run: SupervisedTask | None = None

    def start(self) -> None:
        """Starts to look for a scheduler."""
        self._run = SupervisedTask(
            self._keep_connected(), "session with the scheduler", lambda error: self._owner.stopped(self, error)
        )

    async def close(self) -> None:
        """Ends the session."""
        run, self._run = self._run, None
        if run is not None:
            await run.stop()

    def check_health(self) -> None:
        """Raises RuntimeError once nothing looks for a scheduler any more."""
        if self._run is not None:
            self._run.check()

    @property
    def connected(self) -> bool:
        return self._session is not None

    @property
    def state(self) -> CellState:
        """What the scheduler said last of others, and what is known of this gateway's own sequences."""
        return CellState(self.number, self._load.targets, self._load.sequences_of_others + len(self.streams))

    def submit(self, stream: RemoteStream) -> None:
        """Submits a sequence in the open session, with what it has so far."""
        self.session.submit(stream)
        self.streams[stream.request_id] = stream
        stream.cell = self.number

    def take_back(self, stream: RemoteStream) -> None:
        """The scheduler is to drop the sequence, and what still comes of it does not count."""
        stream.cell = None
        del self.streams[stream.request_id]
        if self._session is not None:
            self._session.cancel(stream.request_id)

    def take_all_back(self) -> list[RemoteStream]:
        """The same for all sequences of this gateway."""
        streams = list(self.streams.values())
        for stream in streams:
            self.take_back(stream)
        return streams

    @property
    def session(self) -> ClientSession:
        """Raises BackendUnavailableError where none is open."""
        if self._session is None:
            raise BackendUnavailableError(f"there is no scheduler: {self.trouble}")
        return self._session

    async def _keep_connected(self) -> None:
        backoff = Backoff(self._options.first_backoff, self._options.longest_backoff)
        while True:
            address = await self._find()
            if address is not None and await self._hold_session(address):
                backoff.reset()
            logger.debug("%s; trying again in %.2f s", self.trouble, backoff.seconds)
            await backoff.pause()

    async def _find(self) -> str | None:
        limit = self._options.connect_timeout
        try:
            async with asyncio.timeout(limit):
                return await self._resolve()
        except TimeoutError:
            self.trouble = f"no address of a scheduler within {limit:g} s"
        except Exception as error:  # noqa: BLE001
            # Whatever the resolver raised, the next attempt may find a scheduler.
            self.trouble = f"no address of a scheduler: {type(error).__name__}: {error}"
        return None

    async def _hold_session(self, address: str) -> bool:
        """Runs one session until it breaks. Returns whether the session was ever open."""
        try:
            channel = self._security.open_channel(address)
        except OSError as error:
            self.trouble = f"scheduler at {address}: no channel: {error}"
            return False
        session = ClientSession(channel, self._security.metadata, self._gateway_id)
        was_open = False
        try:
            await self._run_until_moved(session, address)
        except SessionBrokenError as error:
            known, self.trouble = self.trouble, f"scheduler at {address}: {error}"
            if isinstance(error, VersionConflictError) and self.trouble != known:
                logger.error("no session: %s", self.trouble)
            if isinstance(error, SchedulerReplacedError):
                for stream in self.streams.values():
                    stream.forgive_submission()
            if self._session is session:
                logger.warning("the session is over, looking for a scheduler: %s", self.trouble)
        finally:
            if self._session is session:
                was_open = True
                self._session = None
                self._owner.broke(self, self.take_all_back())
            await channel.close(None)
        return was_open

    async def _run_until_moved(self, session: ClientSession, address: str) -> None:
        """Runs a session until it breaks, or until `resolve` names another address: a hung scheduler breaks no stream.

        Always raises SessionBrokenError.
        """
        running = asyncio.create_task(
            session.run(
                self._options.connect_timeout,
                on_open=lambda: self._opened(session),
                on_event=self._take,
                on_load=self._take_load,
            )
        )
        try:
            while not running.done():
                await asyncio.wait([running], timeout=self._options.watch_interval)
                if not running.done() and await self._find() not in (address, None):
                    raise SessionBrokenError("another scheduler has taken its place")
            if running.cancelled():
                raise SessionBrokenError("the session was cancelled")
            running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _opened(self, session: ClientSession) -> None:
        self._session = session
        self._owner.opened(self)

    def _take_load(self, load: scheduler_pb2.CellLoad) -> None:
        self._load = load
        self._owner.load_changed(self)

    def _take(self, event: scheduler_pb2.SequenceEvent) -> None:
        """Raises ValueError for an event that cannot be understood."""
        stream = self.streams.get(event.request_id)
        if stream is None:
            return
        outcome = read_end(event)
        if event.admitted:
            stream.admit()
        for fingerprint in event.fingerprints:
            name = fingerprint_name(fingerprint.parts)
            stream.fingerprint = name if fingerprint.parts else ""
            stream.fingerprints[name] = dict(fingerprint.parts)
            stream.workers[fingerprint.worker_id] = None
        stream.queue_seconds += event.queue_seconds
        if event.tokens:
            stream.push(read_output(event))
        if event.HasField("suspicion"):
            stream.suspect(from_wire(Suspicion, event.suspicion))
        if outcome is not None:
            del self.streams[event.request_id]
            stream.cell = None
            self._owner.ended(self, stream, outcome)
