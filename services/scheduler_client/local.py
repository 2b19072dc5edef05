"""The backend over a scheduler in the same process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Self

from protos import cell_view_pb2, scheduler_pb2
from scheduler.messages import FinishReason, Role
from services.backend.interface import (
    BackendUnavailableError,
    DeadlineExceededError,
    GenerationRequest,
    LoadFigures,
    ModelInfo,
)
from services.backend.sequence_stream import SequenceStream, TokenDelta
from services.backend.session_codec import load_from_wire, model_from_wire
from services.scheduler.service import SchedulerService, SchedulerStoppedError, ServiceClosedError
from services.scheduler.status import status_of
from services.scheduler.viewer import views


class LocalBackend:
    """Implements services.backend.interface.Backend over `service`, which its owner closes."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service
        self._last_model: ModelInfo | None = None
        self._started = time.monotonic()

    @property
    def cells(self) -> int:
        return 1

    async def submit(self, request: GenerationRequest) -> LocalStream:
        if not any(worker.role is Role.TARGET for worker in (await self.load()).workers):
            raise BackendUnavailableError("no target worker is up")
        try:
            stream = self._service.submit(
                request.prompt,
                request.max_tokens,
                stop_token_ids=request.stop_token_ids,
                sampling=request.sampling,
                draft_length=request.draft_length,
                top_logprobs=request.top_logprobs,
                client_request_id=request.request_id,
                traceparent=request.traceparent,
                key=request.key,
                priority=request.priority,
                prompt_logprobs=request.prompt_logprobs,
            )
        except ServiceClosedError as error:
            raise BackendUnavailableError(str(error)) from error
        return LocalStream(stream, self._service.cancel, request.deadline_seconds)

    async def model(self) -> ModelInfo:
        self._last_model = model_from_wire(self._status()) or self._last_model
        if self._last_model is None:
            raise BackendUnavailableError("no target worker is up")
        return self._last_model

    async def load(self) -> LoadFigures:
        if self._service.closed_because is not None:
            raise BackendUnavailableError(self._service.closed_because)
        return load_from_wire(self._status())

    async def watch(
        self, period_seconds: float, max_sequences: int, cell: int = 1
    ) -> AsyncGenerator[cell_view_pb2.CellView, None]:
        async with aclosing(views(self._service, self._status, period_seconds, max_sequences)) as shown:
            async for view in shown:
                yield view
        raise BackendUnavailableError(self._service.closed_because or "")

    def _status(self) -> scheduler_pb2.StatusReply:
        return status_of(self._service, (), sessions=0, uptime_seconds=time.monotonic() - self._started)


class LocalStream:
    """Implements services.backend.interface.TokenStream."""

    def __init__(
        self, stream: SequenceStream, cancel: Callable[[int], None], deadline_seconds: float | None = None
    ) -> None:
        self._stream = stream
        self._cancel = cancel
        self._timer: asyncio.TimerHandle | None = None
        if deadline_seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(deadline_seconds, self._expire, deadline_seconds)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._stream.finish_reason

    def cancel(self) -> None:
        self._stop_timer()
        self._stream.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        try:
            return await anext(self._stream)
        except SchedulerStoppedError as error:
            self._stop_timer()
            raise BackendUnavailableError(str(error)) from error
        except Exception:
            self._stop_timer()
            raise

    def _expire(self, seconds: float) -> None:
        if not self._stream.closed:
            self._stream.end(DeadlineExceededError(f"the request was not finished within its {seconds:g} s"))
            self._cancel(self._stream.sequence_id)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
