"""Who computes next where one target and one draft share cores, and each is fastest while the other is idle.

Asked only there (`Fleet.time_sliced`).

The worker whose oldest work has waited longer goes next; of equals, the draft. So both get their share, and a draft
step proposes for all sequences that the target's steps before it have brought back.
"""

from __future__ import annotations

from scheduler.state.fleet import Fleet
from scheduler.state.workers import DraftWorker, TargetWorker


def target_may_go(target: TargetWorker, fleet: Fleet) -> bool:
    """Whether a step of this target would compute exclusively, and no step of the draft is due before it.

    `StepPlanner` asks the draft first. So an idle draft that is due has nothing to do: it would be busy otherwise.
    """
    draft = fleet.sole_draft
    if draft is None:
        return True
    return not draft.busy and not (target.busy and _draft_is_first(draft, target))


def draft_may_go(draft: DraftWorker, fleet: Fleet) -> bool:
    """Whether a step of this draft would compute exclusively, and no step of the target is due before it."""
    target = fleet.sole_target
    if target is None:
        return True
    return not target.busy and _draft_is_first(draft, target)


def _draft_is_first(draft: DraftWorker, target: TargetWorker) -> bool:
    ready, drafted = next(iter(draft.ready.values()), None), target.drafted.oldest()
    if ready is None and not draft.lagging:
        return False
    # Sequences whose draft KV lags have waited at least since the draft's last step.
    waits_since = draft.running_since if ready is None else ready.ready_at
    return drafted is None or waits_since <= drafted.drafted_at
