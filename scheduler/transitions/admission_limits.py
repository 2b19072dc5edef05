"""What a new sequence must not exceed: the limits of its key, and those of the queue.

Where the queue is full, a key is refused only if it has its part of the queue: as many waiting sequences as each of
the keys that wait would have if all had equally many. So no key finds the queue filled by others, and a key that waits
alone may fill it. With k keys, at most 1 + 1/2 + ... + 1/k times the limit waits.
"""

from __future__ import annotations

from spool.scheduler.config import SchedulerConfig
from spool.scheduler.messages import RefusalCause, RefuseSequence
from spool.scheduler.state.live_set import WaitingQueue
from spool.scheduler.state.workers import Sequence

TOKENS_PER_MINUTE, MAX_WAITING = "tokens_per_minute", "max_waiting"
MAX_QUEUED_SEQUENCES, MAX_QUEUED_TOKENS = "max_queued_sequences", "max_queued_tokens"
LIMITS = (TOKENS_PER_MINUTE, MAX_WAITING, MAX_QUEUED_SEQUENCES, MAX_QUEUED_TOKENS)


def find_limit(
    sequence: Sequence, waiting: WaitingQueue, config: SchedulerConfig, now: float
) -> tuple[str, RefuseSequence] | None:
    """The limit by which the sequence may not wait, and the refusal. None: it may, as one that is known always may."""
    if is_known(sequence):
        return None
    account, most, most_tokens = sequence.account, config.max_queued_sequences, config.max_queued_tokens
    key, seconds, cause = account.key, account.seconds_until_token(now), RefusalCause.QUEUE_FULL
    if seconds > 0:
        limit, cause = TOKENS_PER_MINUTE, RefusalCause.KEY_LIMIT
        message = f"tokens_per_minute of key {key.name} is {key.tokens_per_minute}, and all of them are used"
    elif key.max_waiting is not None and account.waiting >= key.max_waiting:
        limit, cause = MAX_WAITING, RefusalCause.KEY_LIMIT
        message = f"{account.waiting} sequences wait, max_waiting of key {key.name} is {key.max_waiting}"
    elif len(waiting) >= most and account.waiting >= waiting.part_of(most, account):
        limit = MAX_QUEUED_SEQUENCES
        message = f"{len(waiting)} sequences wait, the limit is {most}"
    elif most_tokens is not None and _too_many_tokens(sequence, waiting, most_tokens):
        limit = MAX_QUEUED_TOKENS
        message = f"{waiting.tokens} tokens wait, {sequence.length} more would pass the limit of {most_tokens}"
    else:
        return None
    return limit, RefuseSequence(sequence.sequence_id, cause, message, seconds or None)


def _too_many_tokens(sequence: Sequence, waiting: WaitingQueue, most: int) -> bool:
    """Whether the sequence passes both the limit of the queue and its key's part of that."""
    account, length = sequence.account, sequence.length
    if not 0 < waiting.tokens > most - length:
        return False
    return 0 < waiting.tokens_of(account) > waiting.part_of(most, account) - length


def is_known(sequence: Sequence) -> bool:
    """Whether a scheduler took the sequence in before."""
    return sequence.request.admitted_before or bool(sequence.request.committed_output)
