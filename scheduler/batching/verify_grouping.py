"""Which of a target's DRAFTED sequences to verify next.

`verify_steps.py` asks, and fits the group into the pages and tokens of a step. All policies keep the wait bound: once
the oldest DRAFTED sequence is due (see TargetWorker.due), the oldest sequences go, whatever their lengths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import assert_never

from scheduler.config import Policy
from scheduler.state.workers import DRAFTING, READY, Sequence


@dataclass(slots=True)
class GroupingView:
    """What a policy may look at: the target's sequences, and those of them that are DRAFTED, oldest first.

    `coming` counts its READY and DRAFTING sequences, `verifying` those in steps not answered yet. `may_wait` is false
    if the step is sent in any case, for a prefill. `drafting`: whether any of the target's sequences draft.
    """

    sequences: Collection[Sequence]
    drafted: Mapping[int, Sequence]
    coming: int
    verifying: int
    batch_size: int
    now: float
    may_wait: bool
    drafting: bool = False


def pick(policy: Policy, view: GroupingView) -> tuple[list[Sequence], bool]:
    """The sequences to verify, oldest first, and whether the wait bound left no choice. No sequences: wait, or none is
    drafted.

    RAGGED picks the oldest sequences, whatever their lengths: best where batches need no padding. EQSPEC has one cohort
    of sequences per target, and picks it once all of them are drafted.

    EXSPEC picks the largest group of equal length and draft length, which needs no padding, once no sequence of that
    length is being drafted for; the oldest sequences where no two are equal.

    AUTO picks all sequences while they fit in one step, else the oldest ones. While they fit, they wait for those in
    the running step, else the target would take two steps in each cycle from then on. They also wait for proposals if
    the target drafts, but not for a probe.
    """
    if not view.drafted:
        return [], False
    group = list(islice(view.drafted.values(), view.batch_size))
    if policy is Policy.RAGGED:
        return group, False
    if view.now >= group[0].due:
        return group, True
    if policy is Policy.EQSPEC:
        waits = bool(view.coming or view.verifying)
    elif policy is Policy.AUTO:
        fit_one_step = len(view.drafted) + view.coming + view.verifying <= view.batch_size
        others_come = view.verifying or (view.coming and view.drafting)
        waits = bool(fit_one_step and view.may_wait and others_come)
    elif policy is Policy.EXSPEC:
        equals: dict[tuple[int, int], list[Sequence]] = {}
        for sequence in view.drafted.values():
            equals.setdefault((sequence.length, len(sequence.draft_tokens)), []).append(sequence)
        # A group of more than a batch is no better than a full batch; of equally large ones, the one with the oldest.
        largest = max(equals.values(), key=lambda equal: min(len(equal), view.batch_size))
        if len(largest) < min(2, view.batch_size):
            return group, False
        group, length = largest[: view.batch_size], largest[0].length
        may_wait = len(group) < view.batch_size and view.may_wait and view.coming > 0
        waits = may_wait and any(one.length == length and one.state in (READY, DRAFTING) for one in view.sequences)
    else:
        assert_never(policy)
    return ([], False) if waits else (group, False)
