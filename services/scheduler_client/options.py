"""Times and limits of a gateway's sessions with schedulers."""

from __future__ import annotations

from dataclasses import dataclass

from services.rpc.backoff import require_positive


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Times in seconds. Sequences fail when no scheduler was reached for `give_up`.

    `connect_timeout` bounds three things: finding a scheduler's address, opening a session, and a call for the status.
    During a session, `resolve` is called every `watch_interval` to learn whether another scheduler has taken over.
    `model` waits up to `first_model_timeout` for the first model, and returns a model for `model_age` before it looks
    again. A sequence fails after `max_fruitless_submissions` sessions that broke before its next token, since the
    sequence itself may be what breaks them.
    """

    give_up: float = 30.0
    connect_timeout: float = 5.0
    first_backoff: float = 0.05
    longest_backoff: float = 1.0
    watch_interval: float = 1.0
    model_age: float = 5.0
    first_model_timeout: float = 10.0
    max_fruitless_submissions: int = 8

    def __post_init__(self) -> None:
        require_positive(
            self,
            "give_up",
            "connect_timeout",
            "first_backoff",
            "longest_backoff",
            "watch_interval",
            "model_age",
            "first_model_timeout",
        )
        if self.max_fruitless_submissions < 1:
            raise ValueError(f"max_fruitless_submissions is {self.max_fruitless_submissions}, must be at least 1")
