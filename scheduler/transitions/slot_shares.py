"""Who takes a slot from another key where all slots are taken, and whose sequence gives the slot up.

A key's share of the slots is that of its weight among the keys with live sequences. The key that is next
(scheduler/state/waiting_queue.py) may take a slot while it runs fewer sequences than its share, from a key that stays
at its share or above it. So each such preemption brings one key nearer to its share and none below its own: two keys
never take slots from each other in turns.
"""

from __future__ import annotations

from scheduler.state.key_accounts import KeyAccount
from scheduler.state.live_set import LiveSet
from scheduler.state.workers import Sequence


def slot_claimant(live: LiveSet) -> Sequence | None:
    """The waiting sequence that may take a slot; None where none may."""
    account = live.waiting.first_key()
    if account is None or account.running == len(live.running):
        return None
    entitled = account.running < _slots_per_weight(live) * account.key.weight
    return live.waiting.first() if entitled else None


def sequence_beyond_share(live: LiveSet, positions: int | None) -> Sequence | None:
    """The last in rank of the idle sequences whose key has its share without them; None where there is none.

    `positions` None: the sequence may be on any target, otherwise on one with pages for so many positions. An idle
    sequence has no row in flight on its target.
    """
    slots_per_weight = _slots_per_weight(live)
    givers = {
        account for account in live.accounts.live() if account.running - 1 >= slots_per_weight * account.key.weight
    }
    victim = None
    for sequence in live.running.values() if givers else ():
        target = sequence.target
        if sequence.account not in givers or target is None or sequence.sequence_id in target.in_flight:
            continue
        if positions is not None and (target.draining or not target.has_room(positions)):
            continue
        if victim is None or sequence.rank > victim.rank:
            victim = sequence
    return victim


def _slots_per_weight(live: LiveSet) -> float:
    accounts: list[KeyAccount] = live.accounts.live()
    return len(live.running) / sum(account.key.weight for account in accounts)
