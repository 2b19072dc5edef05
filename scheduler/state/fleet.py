"""The workers that have joined, and which of them takes a sequence in."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from spool.scheduler.config import Policy, SchedulerConfig
from spool.scheduler.messages import Role, WorkerSpec
from spool.scheduler.speculation.acceptance import Acceptance
from spool.scheduler.state.digests import DigestedTokens
from spool.scheduler.state.workers import DraftWorker, Sequence, TargetWorker

_MAX_LOAD_RATIO = 1.25
"""A known prefix saves work once, for the prompt; a crowded target slows every token of the answer."""


class Fleet:
    """All workers, in the order in which they joined."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.targets: dict[str, TargetWorker] = {}
        self.drafts: dict[str, DraftWorker] = {}
        self._models: dict[str, Acceptance] = {}
        """What is learnt of draft models, by their ids."""
        self._draining: dict[str, TargetWorker | DraftWorker] = {}
        """Those that were not reported as drained."""
        self.max_per_target = config.batch_size if config.policy is Policy.EQSPEC else math.inf
        """Sequences on one target: EQSPEC verifies all of them together."""
        self.accepting = 0
        """Targets that take new sequences: those that do not drain."""
        self.max_running = 0
        """Sequences that may run on all targets that take new ones."""
        self.settled = False
        """Whether workers that were there before this scheduler have joined, or are gone."""
        self._fingerprints: set[str] = set()
        """Of all targets that ever joined."""
        self.largest_capacity = 0
        """Tokens of the longest sequence that any target can hold; 0 without targets."""

    def add(self, spec: WorkerSpec) -> None:
        if spec.role is Role.TARGET:
            acceptance = self._acceptance(spec.own_draft_id) if spec.own_draft_id else None
            self.targets[spec.worker_id] = TargetWorker(spec, self._config, acceptance)
            self._fingerprints.add(spec.fingerprint)
        else:
            acceptance = self._acceptance(spec.model_id or spec.worker_id)
            self.drafts[spec.worker_id] = DraftWorker(spec.worker_id, acceptance)
        self._note_targets()

    def _acceptance(self, model_id: str) -> Acceptance:
        return self._models.setdefault(model_id, Acceptance(self._config.draft_length))

    def remove(self, worker_id: str) -> TargetWorker | None:
        """The target that is gone, if it is one."""
        self.drafts.pop(worker_id, None)
        target = self.targets.pop(worker_id, None)
        if target is not None and target.draft is not None:
            del target.draft.targets[worker_id]
        self._note_targets()
        return target

    def drain(self, worker: TargetWorker | DraftWorker) -> None:
        """The worker will leave: it takes no new sequences, or targets, from now on."""
        worker.draining = True
        self._draining[worker.worker_id] = worker
        self._note_targets()

    def drained(self) -> Iterator[str]:
        """Draining workers that are needed no more, or that are gone, each once."""
        for worker_id, worker in list(self._draining.items()):
            if self.targets.get(worker_id) is worker:
                needed = bool(worker.sequences or worker.outstanding or worker.releases)
            elif self.drafts.get(worker_id) is worker:
                needed = any(target.may_ask(worker_id) for target in self.targets.values())
            else:
                needed = False
            if not needed:
                del self._draining[worker_id]
                yield worker_id

    def _note_targets(self) -> None:
        """Which targets there are has changed, and with it what any of them may do."""
        for target in self.targets.values():
            target.changed = True
        accepting = [target for target in self.targets.values() if not target.draining]
        self.accepting = len(accepting)
        self.max_running = sum(self._config.running_on(target.spec.max_num_batched_tokens) for target in accepting)
        self.largest_capacity = max((target.capacity for target in self.targets.values()), default=0)

    def ends_here(self, target: TargetWorker) -> bool:
        """Whether sequences come to their end on a target that drains, since no other one gives their bits."""
        if self._draining.get(target.worker_id) is not target:
            return False
        own = target.spec.fingerprint
        return all(one.draining or one.spec.fingerprint != own for one in self.targets.values())

    @property
    def ending(self) -> int:
        """Sequences that come to their end on targets that drain, and take no place of others."""
        draining = (self.targets.get(worker_id) for worker_id in self._draining)
        return sum(len(one.sequences) for one in draining if one is not None and self.ends_here(one))

    def must_end(self, sequence: Sequence) -> bool:
        """Whether only targets that drain may take a waiting sequence in, which ran on one of them before."""
        takers = self.takers(sequence)
        return bool(takers) and takers[0].draining

    def takers(self, sequence: Sequence) -> list[TargetWorker]:
        """The targets that may take a sequence in, whether or not they have room.

        One of which something was computed goes on where its bits come from, even if all such targets drain; only where
        none is left, it goes on at any other. Those that a scheduler before this one had may still join.
        """
        accepting = [one for one in self.targets.values() if not one.draining]
        own = sequence.fingerprint
        if not own:
            return accepting
        alike = [one for one in accepting if one.spec.fingerprint == own]
        alike = alike or [one for one in self.targets.values() if one.spec.fingerprint == own and self.ends_here(one)]
        awaited = not self.settled and own not in self._fingerprints
        return alike if alike or awaited else accepting

    def waits_for_its_own(self, sequence: Sequence) -> bool:
        """Whether other sequences may find a target where this one finds none."""
        takers = self.takers(sequence)
        return any(not one.draining and one not in takers for one in self.targets.values())

    def pick_target(
        self, sequence: Sequence, positions: int, kept_for_others: Collection[str] = ()
    ) -> TargetWorker | None:
        """The target to place the sequence on, with room for `positions`; None where there is no such target. Those
        with the fingerprints `kept_for_others` are for sequences that have waited for them longer."""
        most = self.max_per_target
        free = [one for one in self.takers(sequence) if len(one.sequences) < most]
        able = [one for one in free if one.spec.fingerprint not in kept_for_others and one.has_room(positions)]
        return _closest(able, sequence.request.cache_scope, sequence.tokens)


def _closest(targets: list[TargetWorker], scope: bytes, tokens: DigestedTokens) -> TargetWorker | None:
    """Of the targets that would then have at most `_MAX_LOAD_RATIO` times the mean number of sequences, or as few as
    any, one of the newest release: what begins there need not leave when the older ones do. Of these, the one that has
    had the longest prefix of the tokens; among equals the one with the fewest sequences (consistent hashing with
    bounded loads, arXiv 1608.01350, with a memory in place of the hash).
    """
    if len(targets) < 2:
        return targets[0] if targets else None
    counts = [len(target.sequences) for target in targets]
    most = max(min(counts), int(_MAX_LOAD_RATIO * (1 + sum(counts)) / len(targets)) - 1)
    return max(
        (target for target, count in zip(targets, counts, strict=True) if count <= most),
        key=lambda target: (target.spec.release, target.prefixes.longest(scope, tokens), -len(target.sequences)),
    )
