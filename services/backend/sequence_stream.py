"""The output of one sequence as its client reads it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from spool.scheduler.errors import SpoolError
from spool.scheduler.messages import EmitTokens, FinishReason, RefusalCause, Suspicion


class SequenceFailedError(SpoolError, RuntimeError):
    """The sequence cannot be finished; tokens delivered before the error stay valid."""


class AdmissionRefusedError(SpoolError, RuntimeError):
    """The sequence never entered the live set. Trying again later helps only where `cause` is QUEUE_FULL
    or KEY_LIMIT.

    `retry_after_seconds` says when to try again, where that is known.
    """

    def __init__(self, cause: RefusalCause, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.retry_after_seconds = retry_after_seconds


def merged(emissions: Sequence[EmitTokens]) -> EmitTokens:
    """All of them as one: successive output of one sequence, one emission at least."""
    first = emissions[0]
    if len(emissions) == 1:
        return first
    return EmitTokens(
        first.sequence_id,
        tuple(token for emission in emissions for token in emission.tokens),
        sum(emission.drafted for emission in emissions),
        sum(emission.accepted for emission in emissions),
        tuple(digest for emission in emissions for digest in emission.logits_digests),
        tuple(entry for emission in emissions for entry in emission.logprobs),
        tuple(entry for emission in emissions for entry in emission.prompt_logprobs),
        sum(emission.cached for emission in emissions),
    )


class SequenceStream:
    """Async iterator over a sequence's output, for one consumer; receives the output too, in the order of the calls.

    Ends when the sequence is finished; `finish_reason` is known from then on. Raises how the sequence ended otherwise;
    tokens delivered before the error stay valid. Leaving an `async with` block before the end cancels the sequence.
    `client_request_id` is for logs, `traceparent` for traces.
    """

    def __init__(
        self, sequence_id: int, on_cancel: Callable[[int], None], client_request_id: str = "", traceparent: str = ""
    ) -> None:
        self.sequence_id = sequence_id
        self.client_request_id = client_request_id
        self.traceparent = traceparent
        self.finish_reason: FinishReason | None = None
        self.outcome: FinishReason | Exception | None = None
        """How the sequence ended, where it has; output from before the end may still be unread."""
        self.fingerprints: dict[str, Mapping[str, str]] = {}
        """Parts of the fingerprints of the targets that computed the output, by their names."""
        self.queue_seconds = 0.0
        """How long the sequence waited with schedulers until it was first worked on; known with the first output."""
        self.workers: dict[str, None] = {}
        """Ids of the targets that computed the output."""
        self._on_cancel = on_cancel
        self._unread: deque[EmitTokens] = deque()
        self._news = asyncio.Event()

    def cancel(self) -> None:
        """Requests an early end: a stream that has not ended yet then ends with `FinishReason.CANCELLED`."""
        if self.outcome is None:
            self._on_cancel(self.sequence_id)

    async def collect(self) -> list[int]:
        """All tokens from here to the end."""
        return [token async for emission in self for token in emission.tokens]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EmitTokens:
        while not self._unread:
            if isinstance(self.outcome, Exception):
                raise self.outcome
            if self.outcome is not None:
                self.finish_reason = self.outcome
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._take()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def push(self, emission: EmitTokens) -> None:
        if self.outcome is None:
            self._unread.append(emission)
            self._news.set()

    def suspect(self, suspicion: Suspicion) -> None:
        """The sequence ends with its scheduler: nobody else has to know."""

    def end(self, outcome: FinishReason | Exception) -> None:
        """The first end counts."""
        if self.outcome is None:
            self.outcome = outcome
            self._news.set()

    def _take(self) -> EmitTokens:
        return self._unread.popleft()
