"""What a gateway asks of a scheduler, and how that can fail."""

from __future__ import annotations

from dataclasses import dataclass, field

from spool.scheduler.sampling import SamplingParameters


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

    The scheduler refuses what is out of range.
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


class BackendUnavailableError(RuntimeError):
    """No target worker or no scheduler can be reached. Trying again later can help."""


class DeadlineExceededError(RuntimeError):
    """The request's deadline passed before its sequence was finished; the sequence is cancelled."""
