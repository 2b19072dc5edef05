"""Which of a target's IDLE sequences to verify next.

`verify_steps.py` asks, and fits the group into the pages and tokens of a step. All policies keep the wait bound: once
the oldest IDLE sequence is due (see TargetWorker.due), the oldest sequences go, whatever their lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import assert_never

from scheduler.config import Policy
from scheduler.state.workers import Sequence


@dataclass(slots=True)
class GroupingView:
    """What a policy may look at: the target's IDLE sequences, oldest first.

    `verifying` counts those in steps not answered yet. `may_wait` is false if the step is sent in any case, for a
    prefill.
    """

    idle: Mapping[int, Sequence]
    verifying: int
    batch_size: int
    now: float
    may_wait: bool


def pick(policy: Policy, view: GroupingView) -> tuple[list[Sequence], bool]:
    """The sequences to verify, oldest first, and whether the wait bound left no choice. No sequences: wait, or none is
    idle.

    RAGGED picks the oldest sequences, whatever their lengths: best where batches need no padding. EQSPEC has one cohort
    of sequences per target, and picks it once all of them are idle.

    EXSPEC picks the largest group of equal length that may verify equally many tokens, which needs no padding; the
    oldest sequences where no two are equal.

    AUTO picks all sequences while they fit in one step, else the oldest ones. While they fit, they wait for those in
    the running step, else the target would take two steps in each cycle from then on.
    """
    if not view.idle:
        return [], False
    group, waits = list(islice(view.idle.values(), view.batch_size)), False
    if policy is Policy.RAGGED:
        return group, False
    if view.now >= group[0].due:
        return group, True
    if policy is Policy.EQSPEC:
        waits = view.verifying > 0
    elif policy is Policy.AUTO:
        fit_one_step = len(view.idle) + view.verifying <= view.batch_size
        waits = fit_one_step and view.may_wait and view.verifying > 0
    elif policy is Policy.EXSPEC:
        equals: dict[tuple[int, int], list[Sequence]] = {}
        for sequence in view.idle.values():
            equals.setdefault((sequence.length, sequence.verify), []).append(sequence)
        # A group of more than a batch is no better than a full batch; of equally large ones, the one with the oldest.
        largest = max(equals.values(), key=lambda equal: min(len(equal), view.batch_size))
        if len(largest) >= min(2, view.batch_size):
            group = largest[: view.batch_size]
    else:
        assert_never(policy)
    return ([], False) if waits else (group, False)
