"""The stream from a target to its draft worker, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NoReturn

import grpc

from spool.protos import draft_pb2, draft_pb2_grpc, worker_pb2
from spool.services.rpc.backoff import require_positive
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.rpc.errors import reason_of
from spool.services.rpc.protocol_version import SPOKEN
from spool.services.worker.drafting.frames import FRAMES_METADATA_KEY, FrameConnection
from spool.services.worker.drafting.mailbox import Mailbox
from spool.services.worker.drafting.messages import answers_from_wire

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Times in seconds. A draft worker that leaves a ping of gRPC unanswered for `silence_timeout` is lost. Until
    then, steps hardly wait for it (patience.py).

    Pauses between attempts to reach it grow from `first_backoff` to `longest_backoff`. A first attempt of no more than
    `connect_timeout` does not count as a broken stream yet. At most `queued_requests` wait to be sent.
    """

    connect_timeout: float = 2.0
    silence_timeout: float = 5.0
    first_backoff: float = 0.1
    longest_backoff: float = 5.0
    queued_requests: int = 32

    def __post_init__(self) -> None:
        require_positive(
            *(self, "connect_timeout", "silence_timeout", "first_backoff", "longest_backoff", "queued_requests")
        )


class DraftStream:
    """Reaches the draft worker of a grant again and again, until it is closed; what comes goes into the mailbox. No
    call waits for the network."""

    def __init__(
        self,
        grant: worker_pb2.DraftGrant,
        vocabulary_size: int,
        security: ChannelSecurity,
        mailbox: Mailbox,
        options: StreamOptions,
    ) -> None:
        self._grant = grant
        self._vocabulary_size = vocabulary_size
        self._security = security
        self._mailbox = mailbox
        self._options = options
        self._began = time.monotonic()
        self._outgoing: SimpleQueue[draft_pb2.DraftRequest | None] = SimpleQueue()
        self._call: grpc.Call | None = None
        self._frames: FrameConnection | None = None
        self._dropped = self._reason = ""
        self._pause = options.first_backoff
        # Set under the mailbox's lock: from then on the mailbox is another stream's.
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"draft-grant-{grant.number}", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the draft worker was lost or has refused the grant, or was not reached in time. Asked without a
        stream."""
        return bool(self._reason) or time.monotonic() - self._began > self._options.connect_timeout

    def send(self, request: draft_pb2.DraftRequest) -> None:
        """Queues a request; breaks the stream where too many wait already."""
        frames = self._frames
        waiting = self._outgoing.qsize() if frames is None else frames.unsent
        if waiting < self._options.queued_requests:
            send = self._outgoing.put if frames is None else frames.send
            send(request)
        else:
            self._break(f"{waiting} requests wait to be sent, must be at most {self._options.queued_requests}")

    def close(self) -> None:
        with self._mailbox.lock:
            self._closed.set()
            self._mailbox.close()
        self._break("the grant holds no longer")

    def join(self) -> None:
        """Waits until the thread of a closed stream has ended."""
        self._thread.join()

    def _break(self, reason: str) -> None:
        self._dropped = reason
        if (call := self._call) is not None:
            call.cancel()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._dropped = ""
            try:
                self._serve()
                reason = "it has ended the stream"
            except Exception as error:  # noqa: BLE001
                # Files that are missing, a draft that is gone, a message that is none: the next attempt may do better.
                reason = self._dropped or reason_of(error)
            with self._mailbox.lock:
                if self._closed.is_set():
                    return
                # First, so that whoever sees no stream sees that it was lost.
                before, self._reason = self._reason, reason
                self._mailbox.close()
            if reason != before:
                logger.warning("the draft worker at %s does not propose: %s", self._grant.address, reason)
            self._closed.wait(self._pause)
            self._pause = min(2 * self._pause, self._options.longest_backoff)

    def _serve(self) -> None:
        """One stream, to its end."""
        outgoing: SimpleQueue[draft_pb2.DraftRequest | None] = SimpleQueue()
        opening = draft_pb2.DraftOpening(
            protocol_version=SPOKEN.newest, oldest_protocol_version=SPOKEN.oldest, grant=self._grant
        )
        outgoing.put(draft_pb2.DraftRequest(opening=opening))
        with self._security.open_blocking_channel(self._grant.address, self._options.silence_timeout) as channel:
            stub = draft_pb2_grpc.DrafterStub(channel)
            call = stub.Propose(iter(outgoing.get, None), metadata=self._security.metadata)
            frames: FrameConnection | None = None
            try:
                self._outgoing, self._call = outgoing, call
                # It comes once the draft worker has let the target in.
                frames = self._frames = None if self._closed.is_set() else self._connection(call)
                with self._mailbox.lock:
                    if self._closed.is_set():
                        return
                    if call.is_active():
                        self._reason = ""
                        self._mailbox.open()
                        logger.info("the draft worker at %s proposes", self._grant.address)
                for proposals in call if frames is None else frames.messages():
                    self._deliver(proposals)
                if frames is not None:
                    _raise_end_of(call, self._options.connect_timeout)
            finally:
                self._call = self._frames = None
                call.cancel()
                outgoing.put(None)
                if frames is not None:
                    frames.release()

    def _deliver(self, proposals: draft_pb2.Proposals) -> None:
        """Raises BadMessageError where the stream is not to go on with a draft that sends this."""
        answers = answers_from_wire(proposals, self._vocabulary_size)
        with self._mailbox.lock:
            if not self._closed.is_set():
                self._mailbox.deliver(answers, proposals.unknown_ids, proposals.refused_ids)
        self._pause = self._options.first_backoff

    def _connection(self, call: grpc.Call) -> FrameConnection | None:
        """For the messages of a call, where the draft worker offers one and can be reached so."""
        offered = dict(call.initial_metadata() or ()).get(FRAMES_METADATA_KEY)
        if not isinstance(offered, str):
            return None
        try:
            frames = FrameConnection(self._grant.address, offered, self._options.connect_timeout)
        except (OSError, ValueError) as error:
            logger.warning("the draft worker at %s is spoken to by gRPC alone: %s", self._grant.address, error)
            return None
        if not call.add_callback(frames.close):
            frames.close()
        return frames


def _raise_end_of(call: grpc.Future[object], seconds: float) -> NoReturn:
    """Says why a call ends whose frames have ended."""
    with suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError):
        call.result(seconds)
    raise ConnectionError("the connection of its frames has ended")
