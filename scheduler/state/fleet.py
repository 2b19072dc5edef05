"""The workers that have joined, and which of them takes a sequence in."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.config import Policy, SchedulerConfig
from scheduler.messages import Role, WorkerSpec
from scheduler.state.workers import DraftWorker, TargetWorker, Worker


class Fleet:
    """All workers, in the order in which they joined."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.targets: dict[str, TargetWorker] = {}
        self.drafts: dict[str, DraftWorker] = {}
        self.time_sliced = False
        """Whether a single target and at most one draft share cores, and so take turns, each on the cores of both."""

    def workers(self) -> Iterator[Worker]:
        yield from self.drafts.values()
        yield from self.targets.values()

    def find(self, worker_id: str) -> Worker | None:
        return self.targets.get(worker_id) or self.drafts.get(worker_id)

    def add(self, spec: WorkerSpec) -> None:
        config = self._config
        shared = (spec, config.prefill_chunk, config.steps_in_flight)
        if spec.role is Role.TARGET:
            self.targets[spec.worker_id] = TargetWorker(*shared, config.batch_size)
        else:
            self.drafts[spec.worker_id] = DraftWorker(*shared)
        self._note_sharing()

    def remove(self, worker_id: str) -> Worker | None:
        worker: Worker | None = self.targets.pop(worker_id, None) or self.drafts.pop(worker_id, None)
        self._note_sharing()
        return worker

    def _note_sharing(self) -> None:
        small = len(self.targets) == 1 and len(self.drafts) <= 1
        shared = small and all(worker.spec.shares_cores for worker in self.workers())
        self.time_sliced = shared and self._config.policy is Policy.AUTO

    @property
    def sole_target(self) -> TargetWorker | None:
        return next(iter(self.targets.values())) if len(self.targets) == 1 else None

    @property
    def sole_draft(self) -> DraftWorker | None:
        return next(iter(self.drafts.values())) if len(self.drafts) == 1 else None

    def largest_capacity(self) -> int:
        """Tokens of the longest sequence that any target can hold; 0 without targets."""
        return max((target.capacity for target in self.targets.values()), default=0)

    def pick_target(self, positions: int, max_sequences: int | None) -> TargetWorker | None:
        """The target with the fewest sequences, fewer than `max_sequences`, that has room for `positions` more."""
        best = None
        for target in self.targets.values():
            count = len(target.sequences)
            if target.draining:
                continue
            if max_sequences is not None and count >= max_sequences:
                continue
            if (best is None or count < len(best.sequences)) and target.has_room(positions):
                best = target
        return best

    def pick_draft(self, positions: int) -> DraftWorker | None:
        """The draft worker with the fewest sequences that has room for `positions` more."""
        best = None
        for draft in self.drafts.values():
            if (best is None or len(draft.sequences) < len(best.sequences)) and draft.has_room(positions):
                best = draft
        return best
