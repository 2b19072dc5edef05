"""The scheduler as the gateway sees it, in the same process or in another: `Backend` and what passes through it."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from protos import cell_view_pb2
from scheduler.messages import MAX_PRIORITY, MIN_PRIORITY, FinishReason, Role
from scheduler.sampling import SamplingParameters
from services.backend.sequence_stream import TokenDelta


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue.

    `max_tokens` is at least 1 and counts a stop token. `draft_length` None leaves the choice to the scheduler, 0 turns
    speculation off. `top_logprobs` None: no log probabilities; 0: those of the chosen tokens alone; n: those of the n
    most likely tokens as well. `deadline_seconds` counts from `Backend.submit`; None: no deadline. `request_id` is for
    logs alone, and `traceparent` for traces. `key` is the name of the API key that asks, "" for none; `priority` orders
    its requests, lower values first. `prompt_logprobs` is like `top_logprobs`, of the prompt's tokens.

    Raises `ValueError` naming field, value and limit. Limits that depend on the model are the backend's to check.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    draft_length: int | None = None
    top_logprobs: int | None = None
    deadline_seconds: float | None = None
    request_id: str = ""
    traceparent: str = ""
    key: str = ""
    priority: int = 0
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        def require(name: str, holds: bool, limit: str) -> None:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}, must be {limit}")

        if not self.prompt:
            raise ValueError("prompt is empty, must have at least 1 token")
        require("max_tokens", self.max_tokens >= 1, "at least 1")
        require("draft_length", self.draft_length is None or self.draft_length >= 0, "None or at least 0")
        priority_fits = MIN_PRIORITY <= self.priority <= MAX_PRIORITY
        require("priority", priority_fits, f"between {MIN_PRIORITY} and {MAX_PRIORITY}")
        for name in ("top_logprobs", "prompt_logprobs"):
            require(name, getattr(self, name) is None or getattr(self, name) >= 0, "None or at least 0")
        seconds = self.deadline_seconds
        require("deadline_seconds", seconds is None or (math.isfinite(seconds) and seconds > 0), "None or above 0")


class BackendUnavailableError(RuntimeError):
    """No target worker or no scheduler can be reached. Trying again later can help."""


class DeadlineExceededError(RuntimeError):
    """The request's deadline passed before its sequence was finished; the sequence is cancelled."""


class TokenStream(Protocol):
    """Async iterator over the output of one sequence, for one consumer.

    Ends when the sequence is finished; `finish_reason` is known from then on. Raises SequenceFailedError,
    AdmissionRefusedError, BackendUnavailableError or DeadlineExceededError (services.backend.sequence_stream has the
    first two); tokens delivered before the error stay valid. A reader that stops before the end calls `cancel`.
    """

    @property
    def finish_reason(self) -> FinishReason | None: ...

    def cancel(self) -> None:
        """Ends the iteration and frees what the sequence holds, at once. No effect after the end."""
        ...

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    async def __anext__(self) -> TokenDelta: ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the target workers serve. `max_sequence_length` bounds prompt and output together, in tokens.

    `tokenizer_digest` is SHA-256 of the token-to-id table, as `ModelTokenizer.vocabulary_digest` gives it.
    """

    model_id: str
    vocabulary_size: int
    max_sequence_length: int
    tokenizer_digest: bytes


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    worker_id: str
    role: Role
    sequences: int
    pages_in_use: int
    total_pages: int


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """`live_sequences` counts all unfinished ones, the `waiting` ones among them; `workers` are those that are up."""

    live_sequences: int
    waiting: int
    workers: tuple[WorkerLoad, ...]

    @property
    def pages_in_use(self) -> int:
        return sum(worker.pages_in_use for worker in self.workers)

    @property
    def total_pages(self) -> int:
        return sum(worker.total_pages for worker in self.workers)

    def workers_of(self, role: Role) -> int:
        return sum(1 for worker in self.workers if worker.role is role)


class Backend(Protocol):
    """Schedulers, one of each cell, as the gateway sees them. All methods belong to one event loop."""

    @property
    def cells(self) -> int:
        """How many there are."""
        ...

    async def submit(self, request: GenerationRequest) -> TokenStream:
        """Submits a sequence. Raises AdmissionRefusedError or BackendUnavailableError.

        A caller that is cancelled while it waits leaves no sequence behind.
        """
        ...

    async def model(self) -> ModelInfo:
        """What the targets serve; may wait for the first target worker.

        Raises BackendUnavailableError where no target is up and none was up before.
        """
        ...

    async def load(self) -> LoadFigures:
        """Raises BackendUnavailableError."""
        ...

    def watch(
        self, period_seconds: float, max_sequences: int, cell: int = 1
    ) -> AsyncGenerator[cell_view_pb2.CellView, None]:
        """One view of the cell (from 1 on) each period (0.1 to 60 s), until the generator is closed.

        Raises BackendUnavailableError.
        """
        ...
