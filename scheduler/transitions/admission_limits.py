"""What a new sequence must not exceed: the limits of its key, and those of the queue."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.config import SchedulerConfig
from scheduler.messages import RefusalCause
from scheduler.state.live_set import LiveSet
from scheduler.state.workers import Sequence

TOKENS_PER_MINUTE, MAX_WAITING = "tokens_per_minute", "max_waiting"
MAX_QUEUED_SEQUENCES, MAX_QUEUED_TOKENS = "max_queued_sequences", "max_queued_tokens"
LIMITS = (TOKENS_PER_MINUTE, MAX_WAITING, MAX_QUEUED_SEQUENCES, MAX_QUEUED_TOKENS)


@dataclass(frozen=True, slots=True)
class Refusal:
    """`retry_after_seconds`: when the limit lets a sequence in, where that is known."""

    limit: str
    cause: RefusalCause
    message: str
    retry_after_seconds: float | None = None


class AdmissionLimits:
    """Checks new sequences. One that was admitted before, or has output, is never refused and never debited again."""

    def __init__(self, config: SchedulerConfig, live: LiveSet) -> None:
        self._config = config
        self._live = live

    def refusal(self, sequence: Sequence, now: float) -> Refusal | None:
        """Why the sequence may not wait; None if it may."""
        if _is_known(sequence):
            return None
        return self._beyond_key(sequence, now) or self._beyond_queue(sequence)

    def debit(self, sequence: Sequence, now: float) -> None:
        """Takes the prompt from the key's tokens at once: of prompts that come together, not all find the same ones."""
        bucket = sequence.account.bucket
        if bucket is not None and not _is_known(sequence):
            bucket.debit(len(sequence.request.prompt), now)

    def _beyond_key(self, sequence: Sequence, now: float) -> Refusal | None:
        account = sequence.account
        key, bucket = account.key, account.bucket
        seconds = 0.0 if bucket is None else bucket.seconds_until_token(now)
        if seconds > 0:
            message = f"tokens_per_minute of key {key.name} is {key.tokens_per_minute}, and all of them are used"
            return Refusal(TOKENS_PER_MINUTE, RefusalCause.KEY_LIMIT, message, seconds)
        if key.max_waiting is not None and account.waiting >= key.max_waiting:
            message = f"{account.waiting} sequences wait, max_waiting of key {key.name} is {key.max_waiting}"
            return Refusal(MAX_WAITING, RefusalCause.KEY_LIMIT, message)
        return None

    def _beyond_queue(self, sequence: Sequence) -> Refusal | None:
        waiting, limit = self._live.waiting, self._config.max_queued_sequences
        if len(waiting) >= limit:
            message = f"{len(waiting)} sequences wait, the limit is {limit}"
            return Refusal(MAX_QUEUED_SEQUENCES, RefusalCause.QUEUE_FULL, message)
        max_tokens, length = self._config.max_queued_tokens, sequence.length
        if max_tokens is not None and len(waiting) and waiting.tokens + length > max_tokens:
            message = f"{waiting.tokens} tokens wait, {length} more would pass the limit of {max_tokens}"
            return Refusal(MAX_QUEUED_TOKENS, RefusalCause.QUEUE_FULL, message)
        return None


def _is_known(sequence: Sequence) -> bool:
    """Whether a scheduler took the sequence in before."""
    return sequence.request.admitted_before or bool(sequence.request.committed_output)
