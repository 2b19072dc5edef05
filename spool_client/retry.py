"""Which calls that failed are made again, and when."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import grpc

logger = logging.getLogger(__name__)

_RETRY_AFTER = "retry-after"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a call that failed is made again.

    That is after UNAVAILABLE, and after RESOURCE_EXHAUSTED where the server says when to try again: no later attempt
    makes a message smaller. The pause before the next attempt is at least what the server says. It doubles from
    `first_pause` to `longest_pause` seconds, less a random part of up to one half, so that clients that failed together
    do not come back together. A call that has failed `attempts` times in a row fails; for a stream, in a row means
    without anything new. 1 attempt: nothing is tried again.

    Raises ValueError naming field, value and limit.
    """

    attempts: int = 8
    first_pause: float = 0.1
    longest_pause: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}, must be at least 1")
        if not self.first_pause > 0:
            raise ValueError(f"first_pause is {self.first_pause}, must be above 0")
        if not self.longest_pause >= self.first_pause:
            raise ValueError(f"longest_pause is {self.longest_pause}, must be at least first_pause, {self.first_pause}")


class Attempts:
    """The attempts of one call, which has `timeout` seconds altogether; None: no limit."""

    def __init__(self, policy: RetryPolicy, timeout: float | None) -> None:
        self._policy = policy
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._failed = 0

    def seconds_left(self) -> float | None:
        """For the next attempt."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def progressed(self) -> None:
        """An attempt has brought something new, so the count of failures starts again."""
        self._failed = 0

    def pause_after(self, error: grpc.RpcError) -> float:
        """Seconds until the next attempt. Raises `error` where there is to be none, or no time is left for one."""
        self._failed += 1
        told = _seconds_told(error)
        retriable = error.code() is grpc.StatusCode.UNAVAILABLE or (
            error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and told is not None
        )
        if not retriable or self._failed >= self._policy.attempts:
            raise error
        longest = min(self._policy.first_pause * 2 ** (self._failed - 1), self._policy.longest_pause)
        pause = max(told or 0.0, random.uniform(longest / 2, longest))
        left = self.seconds_left()
        if left is not None and pause >= left:
            raise error
        logger.info("%s: %s; trying again in %.2f s", error.code().name, error.details(), pause)
        return pause


def _seconds_told(error: grpc.RpcError) -> float | None:
    """What the server says to wait."""
    trailing = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())
    value = dict(trailing).get(_RETRY_AFTER)
    try:
        return None if value is None else max(float(value), 0.0)
    except ValueError:
        return None
