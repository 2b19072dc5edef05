"""The output of one sequence as its client reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from scheduler.messages import FinishReason, RefusalCause, Suspicion, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Newly committed tokens, from one round with `drafted` proposed tokens of which `accepted` survived.

    `logits_digests` and `logprobs` hold one entry for each token where the request asked for them. With the first
    tokens come `prompt_logprobs`, where asked for: one for each token of the prompt but the first, and how many of the
    prompt's tokens were `cached`.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    logits_digests: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached: int = 0


class DeltaBuffer:
    """Deltas of one sequence that its reader has not taken yet, merged into one.

    However slow the reader is, the buffer never holds more than the sequence's output.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._drafted = 0
        self._accepted = 0
        self._cached = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, delta: TokenDelta) -> None:
        self._tokens.extend(delta.tokens)
        self._logprobs.extend(delta.logprobs)
        self._prompt_logprobs += delta.prompt_logprobs
        self._drafted += delta.drafted
        self._accepted += delta.accepted
        self._cached += delta.cached

    def take(self) -> TokenDelta:
        """Everything that waits; the buffer is empty then."""
        delta = TokenDelta(
            tuple(self._tokens),
            self._drafted,
            self._accepted,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            cached=self._cached,
        )
        self._tokens, self._logprobs, self._prompt_logprobs = [], [], ()
        self._drafted = self._accepted = self._cached = 0
        return delta


class SequenceFailedError(RuntimeError):
    """The sequence cannot be finished; tokens delivered before the error stay valid."""


class AdmissionRefusedError(RuntimeError):
    """The sequence never entered the live set. Trying again later helps only where `cause` is QUEUE_FULL
    or KEY_LIMIT.

    `retry_after_seconds` says when to try again, where that is known.
    """

    def __init__(self, cause: RefusalCause, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.retry_after_seconds = retry_after_seconds


class SequenceStream:
    """Async iterator over TokenDelta, for one consumer.

    Ends when the sequence is finished; `finish_reason` is known from then on. Raises SequenceFailedError or
    AdmissionRefusedError.
    Leaving an `async with` block before the end cancels the sequence. `client_request_id` is for logs, `traceparent`
    for traces.
    """

    def __init__(
        self, sequence_id: int, on_cancel: Callable[[int], None], client_request_id: str = "", traceparent: str = ""
    ) -> None:
        self.sequence_id = sequence_id
        self.client_request_id = client_request_id
        self.traceparent = traceparent
        self.finish_reason: FinishReason | None = None
        self._on_cancel = on_cancel
        self._deltas: asyncio.Queue[TokenDelta | FinishReason | Exception] = asyncio.Queue()
        # The end that the service reported, and the same once the consumer has seen it.
        self._outcome: FinishReason | Exception | None = None
        self._seen: FinishReason | Exception | None = None

    @property
    def closed(self) -> bool:
        """Whether the sequence has ended; deltas from before the end may still be unread."""
        return self._outcome is not None

    def cancel(self) -> None:
        """Requests an early end: a stream that has not ended yet then ends with `FinishReason.CANCELLED`."""
        if self._outcome is None:
            self._on_cancel(self.sequence_id)

    async def collect(self) -> list[int]:
        """All tokens from here to the end."""
        return [token async for delta in self for token in delta.tokens]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        item = self._seen if self._seen is not None else await self._deltas.get()
        if isinstance(item, TokenDelta):
            return item
        self._seen = item
        if isinstance(item, Exception):
            raise item
        self.finish_reason = item
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    # For the service that feeds the stream.

    def push(self, delta: TokenDelta) -> None:
        if self._outcome is None:
            self._deltas.put_nowait(delta)

    def suspect(self, suspicion: Suspicion) -> None:
        """The sequence ends with its scheduler: nobody else has to know."""

    def raise_if_refused(self) -> None:
        """Raises the refusal, where the sequence was refused at once."""
        if isinstance(self._outcome, AdmissionRefusedError):
            raise self._outcome

    def end(self, outcome: FinishReason | Exception) -> None:
        """The first end counts."""
        if self._outcome is None:
            self._outcome = outcome
            self._deltas.put_nowait(outcome)
