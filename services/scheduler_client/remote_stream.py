"""One sequence of a gateway, computed by a scheduler in another process, or by several in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Self

from spool.protos import scheduler_pb2
from spool.scheduler.messages import EmitTokens, FinishReason, Suspicion
from spool.services.backend.interface import DeadlineExceededError, GenerationRequest
from spool.services.backend.sequence_stream import SequenceStream, merged
from spool.services.rpc.conversion import to_wire


class RemoteStream(SequenceStream):
    """Keeps every token received, so that another scheduler can continue after the last one.

    To await it is to wait until the sequence is in the live set; raises why it never was. A caller that is cancelled
    while it waits leaves no sequence behind. Output that its reader has not taken is merged: a slow reader gets all of
    it at once. `on_end` is called once, at the end.
    """

    def __init__(self, request_id: int, request: GenerationRequest, on_end: Callable[[RemoteStream], None]) -> None:
        super().__init__(request_id, lambda _: self.end(FinishReason.CANCELLED), request.request_id)
        loop = asyncio.get_running_loop()
        self.request_id = request_id
        """Another one once the sequence has left a session that goes on: there each is used once."""
        self.request = request
        self.cell: int | None = None
        """The number of the cell whose scheduler has the sequence; None while none has it."""
        self.refused_by: set[int] = set()
        """Numbers of the cells that had no room for it, of those asked so far."""
        self.admitted = False
        """Whether the sequence was ever in the live set."""
        self.fruitless_submissions = 0
        """Sessions since the last token that broke while they had the sequence, which may have been the cause."""
        self.submitted = False
        """Whether the sequence was ever submitted in a session."""
        self.fingerprint = ""
        """Name of that of the target which sampled the last token received; empty where that is not known."""
        self._answered = asyncio.Event()
        self._on_end = on_end
        self._received: list[int] = []
        self._suspicions = 0
        self._suspected_until = 0
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        if request.deadline_seconds is not None:
            self._deadline = loop.time() + request.deadline_seconds
            self._timer = loop.call_at(self._deadline, self._expire)

    def __await__(self) -> Generator[Any, None, Self]:
        try:
            yield from self._answered.wait().__await__()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.refusal is not None:
            raise self.refusal
        return self

    @property
    def refusal(self) -> Exception | None:
        """Why the sequence has ended without ever being in the live set, where nobody cancelled it."""
        return self.outcome if isinstance(self.outcome, Exception) and not self.admitted else None

    def submission(self) -> scheduler_pb2.SequenceSubmission:
        """All that a scheduler needs to continue the sequence."""
        remaining = None
        if self._deadline is not None:
            # The timer takes care of a deadline that has just passed.
            remaining = max(self._deadline - asyncio.get_running_loop().time(), 0.001)
        self.fruitless_submissions += 1
        self.submitted = True
        suspicion = Suspicion(self._suspicions, max(0, self._suspected_until - len(self._received)))
        return to_wire(
            scheduler_pb2.SequenceSubmission,
            self.request,
            request_id=self.request_id,
            client_request_id=self.client_request_id,
            committed_output=self._received,
            fingerprint=self.fingerprint,
            admitted_before=self.admitted,
            timeout_seconds=remaining,
            suspicion=suspicion if suspicion.count else None,
        )

    def forgive_submission(self) -> None:
        """The sequence left its last session for a reason that is known not to be the sequence."""
        self.fruitless_submissions = max(self.fruitless_submissions - 1, 0)

    def admit(self) -> None:
        self.admitted = True
        self.refused_by.clear()
        self._answered.set()

    def push(self, emission: EmitTokens) -> None:
        if self.outcome is None:
            self.fruitless_submissions = 0
            self._received.extend(emission.tokens)
        super().push(emission)

    def suspect(self, suspicion: Suspicion) -> None:
        """A scheduler suspects the sequence, which the next one is to know."""
        self._suspicions = suspicion.count
        self._suspected_until = len(self._received) + suspicion.tokens

    def end(self, outcome: FinishReason | Exception) -> None:
        if self.outcome is not None:
            return
        super().end(outcome)
        if self._timer is not None:
            self._timer.cancel()
        self._answered.set()
        self._on_end(self)

    def _take(self) -> EmitTokens:
        taken = merged(self._unread)
        self._unread.clear()
        return taken

    def _expire(self) -> None:
        seconds = self.request.deadline_seconds
        self.end(DeadlineExceededError(f"the request was not finished within its {seconds:g} s"))
