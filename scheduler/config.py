"""How a scheduler is set up. Checked once, at construction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from spool.scheduler.key_class import KeyClass

MAX_RUNNING = 256
# A pass then has room for the next token of each sequence and three of a draft.
_TOKENS_OF_EACH = 4


class Policy(Enum):
    """How verify groups are formed; see scheduler/batching/verify_grouping.py."""

    EQSPEC = "eqspec"
    EXSPEC = "exspec"
    RAGGED = "ragged"
    AUTO = "auto"


class KvMovement(Enum):
    """Whether sequences that leave a draining target take their KV to another one."""

    AUTO = "auto"
    """Moved where that is expected to take less time than computing it anew."""
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and choices of one scheduler core.

    `max_running` bounds the running sequences for each target that does not drain (None: as `running_on` says; with
    three targets, three times as many may run), `batch_size` those of a verify group, and `prefill_chunk` the tokens
    that catch up in one step of a target (None: half of those that its passes take). Every round drafts `draft_length`
    tokens, under AUTO up to so many. `max_queued_sequences` and `max_queued_tokens` bound what waits; beyond them
    submissions of keys that have their part of the queue are refused (scheduler/transitions/admission_limits.py). Under
    EXSPEC, `wait_bound_steps` verify groups may pass a sequence over when it would be its turn. Where draft lengths are
    fixed, a step waits for a draft worker as long as so many verify steps take, which is taken to be
    `initial_step_seconds` each until it was measured. `steps_in_flight` includes the step that a target runs. `keys`
    are the classes of the API keys that have a name; each other key has weight 1 and no limits.

    Raises `ValueError` naming field, value and limit.
    """

    batch_size: int = 8
    max_running: int | None = None
    policy: Policy = Policy.AUTO
    draft_length: int = 4
    prefill_chunk: int | None = None
    max_queued_sequences: int = 1024
    max_queued_tokens: int | None = None
    wait_bound_steps: float = 1.5
    initial_step_seconds: float = 0.05
    steps_in_flight: int = 2
    kv_movement: KvMovement = KvMovement.AUTO
    keys: tuple[KeyClass, ...] = ()

    def __post_init__(self) -> None:
        def require(name: str, holds: bool, limit: str) -> None:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}, must be {limit}")

        for name in ("batch_size", "max_queued_sequences", "steps_in_flight"):
            require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("max_running", "prefill_chunk", "max_queued_tokens"):
            value = getattr(self, name)
            require(name, value is None or value >= 1, "None or at least 1")
        require("policy", isinstance(self.policy, Policy), f"one of {', '.join(p.value for p in Policy)}")
        require(
            "kv_movement", isinstance(self.kv_movement, KvMovement), f"one of {', '.join(m.value for m in KvMovement)}"
        )
        require("draft_length", self.draft_length >= 0, "0 (no drafting) or more")
        finite = math.isfinite
        require("wait_bound_steps", finite(self.wait_bound_steps) and self.wait_bound_steps >= 0, "finite, 0 or more")
        require("initial_step_seconds", finite(self.initial_step_seconds) and self.initial_step_seconds > 0, "above 0")
        names = [key.name for key in self.keys]
        for place, name in enumerate(names):
            if not name:
                raise ValueError(f"keys[{place}] has the name '', must have at least 1 character")
            if name in names[:place]:
                raise ValueError(f"keys[{place}] has the name {name!r}, must differ from keys[{names.index(name)}]")

    def running_on(self, max_num_batched_tokens: int) -> int:
        """Sequences that may run for each target whose passes take at most this number of tokens."""
        return self.max_running or min(MAX_RUNNING, max(1, max_num_batched_tokens // _TOKENS_OF_EACH))
