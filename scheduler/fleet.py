"""The workers that are there, and who of them takes a sequence in."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.config import SchedulerConfig
from scheduler.messages import Role, WorkerSpec
from scheduler.worker_book import DraftBook, TargetBook, WorkerBook


class Fleet:
    """Books of all workers, in the order in which they joined."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.targets: dict[str, TargetBook] = {}
        self.drafts: dict[str, DraftBook] = {}
        self.shares_cores = False
        """Whether a target, or a target and a draft, are alone and each faster while the other is idle."""

    def books(self) -> Iterator[WorkerBook]:
        yield from self.drafts.values()
        yield from self.targets.values()

    def find(self, worker_id: str) -> WorkerBook | None:
        return self.targets.get(worker_id) or self.drafts.get(worker_id)

    def add(self, spec: WorkerSpec) -> None:
        config = self._config
        shared = (spec, config.prefill_chunk, config.steps_in_flight, config.initial_step_seconds)
        if spec.role is Role.TARGET:
            self.targets[spec.worker_id] = TargetBook(*shared, config.batch_size)
        else:
            self.drafts[spec.worker_id] = DraftBook(*shared)
        self._note_sharing()

    def remove(self, worker_id: str) -> WorkerBook | None:
        book = self.targets.pop(worker_id, None) or self.drafts.pop(worker_id, None)
        self._note_sharing()
        return book

    def _note_sharing(self) -> None:
        small = len(self.targets) == 1 and len(self.drafts) <= 1
        self.shares_cores = small and all(book.spec.shares_cores for book in self.books())
        if not self.shares_cores:
            self.take_turns(False)

    def take_turns(self, turns: bool) -> None:
        """Whether steps are to be run one at a time from now on."""
        for book in self.books():
            book.turns = turns

    @property
    def sole_target(self) -> TargetBook | None:
        return next(iter(self.targets.values())) if len(self.targets) == 1 else None

    @property
    def sole_draft(self) -> DraftBook | None:
        return next(iter(self.drafts.values())) if len(self.drafts) == 1 else None

    def largest_capacity(self) -> int:
        """Tokens of the longest sequence that any target can hold; 0 without targets."""
        return max((target.capacity for target in self.targets.values()), default=0)

    def choose_target(self, positions: int, most_sequences: int | None) -> TargetBook | None:
        """The target with the fewest sequences among those that have room for one of so many positions."""
        best = None
        for target in self.targets.values():
            count = len(target.sequences)
            if target.draining:
                continue
            if most_sequences is not None and count >= most_sequences:
                continue
            if (best is None or count < len(best.sequences)) and target.has_room(positions):
                best = target
        return best

    def choose_draft(self, positions: int) -> DraftBook | None:
        """The same among draft workers."""
        best = None
        for draft in self.drafts.values():
            if (best is None or len(draft.sequences) < len(best.sequences)) and draft.has_room(positions):
                best = draft
        return best
