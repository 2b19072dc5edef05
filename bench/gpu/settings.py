"""What is measured, with what, on what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.offline.grid import System
from engine.settings import EngineSettings
from scheduler.config import Policy, SchedulerConfig

SYSTEMS = (System.PLAIN, System.AUTO, System.RAGGED)
_EXACT: tuple[dict[str, Any], ...] = ({"exact": True}, {"exact": False})
_GRAPHS: tuple[dict[str, Any], ...] = ({"cuda_graphs": True}, {"cuda_graphs": False})

_PAGE_SIZE = 16
_WINDOW_BATCHES = 4


@dataclass(frozen=True, slots=True)
class GpuBenchSettings:
    """Raises `ValueError` naming field, value and limit.

    A cell decodes `sequences_per_row` times its batch size, at least `compared`, sequences of `prompt_tokens` random
    tokens to `max_tokens` new ones. Of the first `compared`, outputs are compared with batch-1 plain decoding, and
    `logits_tokens` logits each with speculation at `logits_batch_size`.
    """

    shape: str
    agreement: float
    batch_sizes: tuple[int, ...]
    device: str
    dtype: str = "bfloat16"
    seed: int = 0
    draft_length: int = 4
    prompt_tokens: int = 32
    max_tokens: int = 64
    sequences_per_row: int = 4
    compared: int = 8
    logits_batch_size: int = 32
    logits_tokens: int = 32
    prefill_chunk: int = 256

    def __post_init__(self) -> None:
        if not self.batch_sizes or len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise ValueError(f"batch_sizes is {list(self.batch_sizes)}, must hold at least one, and none twice")
        for batch_size in self.batch_sizes:
            if not 1 <= batch_size <= 4096:
                raise ValueError(f"batch_sizes holds {batch_size}, must be between 1 and 4096")
        for name, low, high in (
            ("draft_length", 1, 64),
            ("prompt_tokens", 1, 1 << 20),
            ("max_tokens", 8, 1 << 20),
            ("sequences_per_row", 1, 1000),
            ("compared", 1, 4096),
            ("logits_batch_size", 1, 4096),
            ("logits_tokens", 1, self.max_tokens),
            ("prefill_chunk", 8, 65536),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}, must be between {low} and {high}")

    @property
    def target_variants(self) -> tuple[dict[str, Any], ...]:
        """Settings of the target's engine that are varied, each set measured at every point. Whatever else an engine
        can do without or with belongs here and nowhere else: cells carry the whole set."""
        if self.device == "cpu":
            return _EXACT
        return tuple(exact | graphs for exact in _EXACT for graphs in _GRAPHS)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"batch_sizes": list(self.batch_sizes)}

    @property
    def largest_batch(self) -> int:
        return max(*self.batch_sizes, self.logits_batch_size)

    @property
    def longest(self) -> int:
        """Positions of a sequence at its end, with the draft of a last round."""
        return self.prompt_tokens + self.max_tokens + self.draft_length + 1

    def sequences(self, batch_size: int) -> int:
        return max(self.compared, self.sequences_per_row * batch_size)

    def engine(self, model: str, **variant: Any) -> EngineSettings:
        """Room for all running sequences at full length, and for all drafts and a chunk of prefill in one pass."""
        return EngineSettings(
            model,
            dtype=self.dtype,
            device=self.device,
            page_size=_PAGE_SIZE,
            # One more each: the scheduler keeps pages back for those under way to grow into.
            kv_pages=_WINDOW_BATCHES * self.largest_batch * (-(-self.longest // _PAGE_SIZE) + 1),
            max_num_batched_tokens=self.largest_batch * (self.draft_length + 1) + self.prefill_chunk,
            **variant,
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One cell of the grid of a variant of the target."""

    system: System
    batch_size: int

    def __str__(self) -> str:
        return f"{self.system.value}, batch {self.batch_size}"

    def scheduling(self, settings: GpuBenchSettings) -> SchedulerConfig:
        """Target and draft take turns, so more running sequences than the batch has nothing to overlap with. But
        `ragged` waits for nobody, and only finds its steps full where many others are ready."""
        ragged = self.system is System.RAGGED
        many = ragged and self.batch_size > 1
        return SchedulerConfig(
            batch_size=self.batch_size,
            max_running=self.batch_size * (_WINDOW_BATCHES if many else 1),
            policy=Policy.RAGGED if ragged else Policy.AUTO,
            draft_length=settings.draft_length if self.system.drafts else 0,
            prefill_chunk=settings.prefill_chunk,
            max_queued_sequences=settings.sequences(self.batch_size),
        )


REFERENCE = Point(System.PLAIN, 1)


def grid(settings: GpuBenchSettings) -> Iterator[Point]:
    """Small batches first, and plain decoding before what is compared with it."""
    for batch_size in sorted(settings.batch_sizes):
        for system in SYSTEMS:
            yield Point(system, batch_size)


def variant_name(variant: Mapping[str, Any]) -> str:
    names = {name: name.replace("_", " ").replace("cuda", "CUDA") for name in variant}
    return ", ".join(
        names[name] if on is True else f"not {names[name]}" if on is False else f"{names[name]} {on}"
        for name, on in variant.items()
    )
