"""What a gateway asks of a scheduler, and how that can fail."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scheduler.messages import MAX_PRIORITY, MIN_PRIORITY
from scheduler.sampling import SamplingParameters


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue.

    `max_tokens` is at least 1 and counts a stop token. `draft_length` None leaves the choice to the scheduler, 0 turns
    speculation off. `top_logprobs` None: no log probabilities; 0: those of the chosen tokens alone; n: those of the n
    most likely tokens as well. `deadline_seconds` counts from the submission; None: no deadline. `request_id` is for
    logs alone, and `traceparent` for traces. `key` is the name of the API key that asks, "" for none; `priority` orders
    its requests, lower values first. `prompt_logprobs` is like `top_logprobs`, of the prompt's tokens. Only requests of
    the same `cache_scope`, empty or 32 bytes, take over each other's KV. `logits_digests` asks for a digest of the
    logits that each token is sampled from. `expected_output` is proposed in place of what a draft model proposes.

    Raises `ValueError` naming field, value and limit. Limits that depend on the model are the scheduler's to check.
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
    cache_scope: bytes = b""
    logits_digests: bool = False
    expected_output: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt is empty, must have at least 1 token")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}, must be at least 1")
        if not MIN_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise ValueError(f"priority is {self.priority}, must be between {MIN_PRIORITY} and {MAX_PRIORITY}")
        for name in ("draft_length", "top_logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}, must be None or at least 0")
        seconds = self.deadline_seconds
        if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"deadline_seconds is {seconds}, must be None or above 0")


class BackendUnavailableError(RuntimeError):
    """No target worker or no scheduler can be reached. Trying again later can help."""


class DeadlineExceededError(RuntimeError):
    """The request's deadline passed before its sequence was finished; the sequence is cancelled."""
