"""Which of a target's IDLE sequences to verify next.

`verify_steps.py` asks, and fits the group into the pages and tokens of a step. A policy waits only for steps in flight,
so their answers end every wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import assert_never

from spool.scheduler.config import Policy
from spool.scheduler.state.workers import Sequence


def pick(
    policy: Policy, idle: Mapping[int, Sequence], batch_size: int, groups: int, verifying: int, may_wait: bool
) -> tuple[list[Sequence], bool]:
    """The sequences to verify, oldest first, and whether the wait bound left no choice. No sequences: wait, or none is
    idle. `groups` counts the target's groups before this one, and `verifying` its sequences in steps that are not
    answered yet. `may_wait` is false if the step is sent in any case, for a prefill.

    RAGGED picks the oldest sequences, whatever their lengths: best where batches need no padding. EQSPEC has one cohort
    of sequences per target, and picks it once all of them are idle.

    EXSPEC picks the largest group of equal length that may verify equally many tokens, which needs no padding; the
    oldest sequences where no two are equal, or where the oldest is due (see `TargetWorker.due`).

    AUTO picks all sequences while they fit in one step, else the oldest ones. While they fit, they wait for those in
    the running step, else the target would take two steps in each cycle from then on.
    """
    if not idle:
        return [], False
    group, waits = list(islice(idle.values(), batch_size)), False
    if policy is Policy.EQSPEC:
        waits = verifying > 0
    elif policy is Policy.AUTO:
        fit_one_step = len(idle) + verifying <= batch_size
        waits = fit_one_step and may_wait and verifying > 0
    elif policy is Policy.EXSPEC:
        if groups >= group[0].due:
            return group, True
        equals: dict[tuple[int, int], list[Sequence]] = {}
        for sequence in idle.values():
            equals.setdefault((sequence.length, sequence.verify), []).append(sequence)
        # A group of more than a batch is no better than a full batch; of equally large ones, the one with the oldest.
        largest = max(equals.values(), key=lambda equal: min(len(equal), batch_size))
        if len(largest) >= min(2, batch_size):
            group = largest[:batch_size]
    elif policy is not Policy.RAGGED:
        assert_never(policy)
    return ([], False) if waits else (group, False)
