"""Who computes next where one target and one draft share cores, and each is fastest while the other is idle.

Whoever's oldest work has waited for longer goes next; the draft where that is equal. So both are served, and a draft
step proposes for all that the target's steps before it have brought back.
"""

from __future__ import annotations

from scheduler.fleet import Fleet
from scheduler.worker_book import DraftBook, TargetBook


def target_may_go(target: TargetBook, fleet: Fleet) -> bool:
    """Whether a step of this target would compute alone, and none of the draft is due before it.

    To be asked after the draft: an idle one that is due has nothing it can do if it has not begun.
    """
    if not target.turns or (draft := fleet.sole_draft) is None:
        return True
    return not draft.busy and not (target.busy and _draft_is_first(draft, target))


def draft_may_go(draft: DraftBook, fleet: Fleet) -> bool:
    """The same for a step of this draft."""
    if not draft.turns or (target := fleet.sole_target) is None:
        return True
    return not target.busy and _draft_is_first(draft, target)


def _draft_is_first(draft: DraftBook, target: TargetBook) -> bool:
    ready, drafted = next(iter(draft.ready.values()), None), target.drafted.oldest()
    if ready is None and not draft.lagging:
        return False
    # What lags behind has waited at least since the draft's last step.
    waits_since = draft.running_since if ready is None else ready.ready_at
    return drafted is None or waits_since <= drafted.drafted_at
