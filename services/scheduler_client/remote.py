"""The backend over a scheduler in another process, which may be replaced by another one at any time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from protos import cell_view_pb2, scheduler_pb2
from services.backend.interface import (
    BackendUnavailableError,
    GenerationRequest,
    LoadFigures,
    ModelInfo,
)
from services.backend.sequence_stream import SequenceFailedError
from services.backend.session_codec import load_from_wire, model_from_wire, read_delta, read_end
from services.rpc.backoff import Backoff, require_positive
from services.rpc.channel_security import ChannelSecurity
from services.rpc.supervision import SupervisedTask
from services.scheduler_client.remote_stream import RemoteStream
from services.scheduler_client.session import (
    ClientSession,
    SchedulerReplacedError,
    SessionBrokenError,
    VersionConflictError,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Times in seconds. Sequences fail when no scheduler was reached for `give_up`.

    `connect_timeout` bounds three things: finding a scheduler's address, opening a session, and a call for the status.
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

    def __post_init__(self) -> None:
        require_positive(
            self,
            "give_up",
            "connect_timeout",
            "first_backoff",
            "longest_backoff",
            "watch_interval",
            "model_age",
            "first_model_timeout",
        )
        if self.max_fruitless_submissions < 1:
            raise ValueError(f"max_fruitless_submissions is {self.max_fruitless_submissions}, must be at least 1")


class RecoveryListener(Protocol):
    """Hears of sessions that open and break. Calls come from the event loop and must not block."""

    def session_opened(self) -> None: ...

    def session_broke(self) -> None: ...

    def resubmitted(self, sequences: int) -> None:
        """So many sequences go on in another session."""


class SchedulerClient:
    """Implements services.backend.interface.Backend over a session with the scheduler that `resolve` names.

    When the session breaks, the client calls `resolve` again and submits every unfinished sequence there with the
    tokens received so far. Readers of the streams see a pause only: the output depends on the request alone, so it goes
    on exactly where it stopped. Use `async with`, or `start` and `close`; all methods belong to one event loop.
    """

    def __init__(
        self,
        resolve: Callable[[], Awaitable[str]],
        *,
        security: ChannelSecurity | None = None,
        options: ClientOptions | None = None,
        gateway_id: str = "",
        listener: RecoveryListener | None = None,
    ) -> None:
        self._resolve = resolve
        self._security = security or ChannelSecurity()
        self._options = options or ClientOptions()
        self._gateway_id = gateway_id
        self._listener = listener
        self._ids = itertools.count(1)
        self._live: dict[int, RemoteStream] = {}
        self._session: ClientSession | None = None
        self._trouble = "no scheduler was reached yet"
        self._gave_up = False
        self._patience: asyncio.TimerHandle | None = None
        self._run: SupervisedTask | None = None
        self._model: ModelInfo | None = None
        self._model_time = float("-inf")

    def start(self) -> None:
        """Starts to look for a scheduler."""
        self._lose_patience_later()
        self._run = SupervisedTask(self._keep_connected(), "session with the scheduler", self._connecting_ended)

    async def close(self) -> None:
        """Ends the session. Unfinished sequences fail."""
        run, self._run = self._run, None
        if self._patience is not None:
            self._patience.cancel()
        self._fail_all("the gateway is shutting down")
        if run is not None:
            await run.stop()

    def check_health(self) -> None:
        """Raises RuntimeError once nothing looks for a scheduler any more."""
        if self._run is not None:
            self._run.check()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def connected(self) -> bool:
        return self._session is not None

    @property
    def scheduler_epoch(self) -> int:
        """The epoch of the session's scheduler; 0 without a session."""
        return self._session.scheduler_epoch if self._session is not None else 0

    async def submit(self, request: GenerationRequest) -> RemoteStream:
        if self._run is None:
            raise BackendUnavailableError("the connection to the scheduler is closed")
        if self._run.error is not None:
            raise BackendUnavailableError(f"the connection to the scheduler is broken: {self._run.error!r}")
        if self._gave_up:
            raise BackendUnavailableError(self._given_up())
        stream = RemoteStream(next(self._ids), request, self._ended)
        self._live[stream.request_id] = stream
        if self._session is not None:
            self._session.submit(stream.submission())
        try:
            await stream.admission
        except asyncio.CancelledError:
            stream.cancel()
            raise
        return stream

    async def model(self) -> ModelInfo:
        clock = asyncio.get_running_loop().time
        if self._model is not None and clock() - self._model_time < self._options.model_age:
            return self._model
        end = clock() + self._options.first_model_timeout
        while True:
            try:
                self._learn_model(await self.status(), clock())
                trouble = BackendUnavailableError("no target worker is up")
            except BackendUnavailableError as error:
                trouble = error
            if self._model is not None:
                return self._model
            # A gateway that replaces another has clients at once, and finds its scheduler a little later.
            if self._gave_up or clock() >= end:
                raise trouble
            await asyncio.sleep(self._options.first_backoff)

    def _learn_model(self, status: scheduler_pb2.StatusReply, now: float) -> None:
        model = model_from_wire(status)
        if model is not None:
            self._model, self._model_time = model, now

    async def load(self) -> LoadFigures:
        return load_from_wire(await self.status())

    async def status(self) -> scheduler_pb2.StatusReply:
        """Raises BackendUnavailableError."""
        if self._session is None:
            raise BackendUnavailableError(f"there is no scheduler: {self._trouble}")
        try:
            status = await self._session.status(self._options.connect_timeout)
        except SessionBrokenError as error:
            raise BackendUnavailableError(f"the scheduler does not answer: {error}") from error
        if status.state != scheduler_pb2.SCHEDULER_STATE_SERVING:
            raise BackendUnavailableError(f"the scheduler is closed: {status.reason}")
        return status

    async def watch(self, period_seconds: float, max_sequences: int) -> AsyncGenerator[cell_view_pb2.CellView, None]:
        """One view of the cell each period, until the reader stops. Raises BackendUnavailableError."""
        session = self._session
        if session is None:
            raise BackendUnavailableError(f"there is no scheduler: {self._trouble}")
        async with aclosing(session.watch(period_seconds, max_sequences)) as views:
            try:
                async for view in views:
                    yield view
            except SessionBrokenError as error:
                raise BackendUnavailableError(f"the scheduler does not answer: {error}") from error

    async def _keep_connected(self) -> None:
        backoff = Backoff(self._options.first_backoff, self._options.longest_backoff)
        while True:
            address = await self._find()
            if address is not None and await self._hold_session(address):
                backoff.reset()
            logger.debug("%s; trying again in %.2f s", self._trouble, backoff.seconds)
            await backoff.pause()

    async def _find(self) -> str | None:
        limit = self._options.connect_timeout
        try:
            async with asyncio.timeout(limit):
                return await self._resolve()
        except TimeoutError:
            self._trouble = f"no address of a scheduler within {limit:g} s"
        except Exception as error:
            # Whatever the resolver raised, the next attempt may find a scheduler.
            self._trouble = f"no address of a scheduler: {type(error).__name__}: {error}"
        return None

    async def _hold_session(self, address: str) -> bool:
        """Runs one session until it breaks. Returns whether the session was ever open."""
        try:
            channel = self._security.open_channel(address)
        except OSError as error:
            self._trouble = f"scheduler at {address}: no channel: {error}"
            return False
        session = ClientSession(channel, self._security.metadata, self._gateway_id)
        was_open = False
        try:
            await self._run_until_moved(session, address)
        except SessionBrokenError as error:
            known, self._trouble = self._trouble, f"scheduler at {address}: {error}"
            if isinstance(error, VersionConflictError) and self._trouble != known:
                logger.error("no session: %s", self._trouble)
            if isinstance(error, SchedulerReplacedError):
                for stream in self._live.values():
                    stream.forgive_submission()
            if self._session is session:
                logger.warning("the session is over, looking for a scheduler: %s", self._trouble)
        finally:
            if self._session is session:
                was_open = True
                self._session = None
                if self._listener is not None:
                    self._listener.session_broke()
                self._lose_patience_later()
            await channel.close(None)
        return was_open

    async def _run_until_moved(self, session: ClientSession, address: str) -> None:
        """Runs a session until it breaks, or until `resolve` names another address: a hung scheduler breaks no stream.

        Always raises SessionBrokenError.
        """
        running = asyncio.create_task(
            session.run(self._options.connect_timeout, lambda: self._opened(session), self._take)
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
        self._gave_up = False
        if self._listener is not None:
            self._listener.session_opened()
        if self._patience is not None:
            self._patience.cancel()
        most = self._options.max_fruitless_submissions
        resubmitted = 0
        for stream in list(self._live.values()):
            if stream.fruitless_submissions >= most:
                message = f"{stream.fruitless_submissions} sessions broke without a token for the sequence"
                stream.end(SequenceFailedError(f"{message}; the last: {self._trouble}"), known_there=True)
            else:
                if stream.submitted:
                    resubmitted += 1
                    named = {"request_id": stream.client_request_id}
                    logger.info("a sequence goes on in another session", extra=named)
                session.submit(stream.submission())
        if resubmitted and self._listener is not None:
            self._listener.resubmitted(resubmitted)

    def _take(self, event: scheduler_pb2.SequenceEvent) -> None:
        """Raises ValueError for an event that cannot be understood."""
        stream = self._live.get(event.request_id)
        if stream is None:
            return
        outcome = read_end(event)
        if event.admitted:
            stream.admit()
        if event.tokens:
            stream.push(read_delta(event))
        if outcome is not None:
            stream.end(outcome, known_there=True)

    def _ended(self, stream: RemoteStream, known_there: bool) -> None:
        self._live.pop(stream.request_id, None)
        if self._session is not None and not known_there:
            self._session.cancel(stream.request_id)

    def _lose_patience_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(self._options.give_up, self._give_up)

    def _give_up(self) -> None:
        self._gave_up = True
        self._fail_all(self._given_up())

    def _given_up(self) -> str:
        return f"no scheduler was reached for {self._options.give_up:g} s: {self._trouble}"

    def _connecting_ended(self, error: Exception) -> None:
        logger.error("nothing looks for a scheduler any more: %s", error, exc_info=error)
        self._fail_all(f"the connection to the scheduler is broken: {error!r}")

    def _fail_all(self, reason: str) -> None:
        for stream in list(self._live.values()):
            stream.end(BackendUnavailableError(reason), known_there=False)
