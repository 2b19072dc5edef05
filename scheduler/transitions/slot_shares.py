"""Which sequence gives its slot up for one of another key, where all slots are taken.

A key's share of the slots is that of its weight among the keys with live sequences. A key with fewer running sequences
than its share takes a slot from one that stays at its share or above it without that slot. So each such preemption
brings a key nearer to its share and none below its own, and the two never take slots from each other in turns.
"""

from __future__ import annotations

from scheduler.state.key_accounts import KeyAccount
from scheduler.state.live_set import LiveSet
from scheduler.state.workers import Sequence


def sequence_beyond_share(live: LiveSet, newcomer: Sequence, positions: int | None) -> Sequence | None:
    """The last in rank of the idle sequences whose key runs more than its share; None where nobody must make room.

    `positions` None: the slot may be on any target, otherwise on one with pages for so many positions. An idle sequence
    has no row in flight on its target.
    """
    accounts = live.accounts.live()
    slots_per_weight = len(live.running) / sum(account.key.weight for account in accounts)

    def beyond(account: KeyAccount, slots: float) -> bool:
        return account.running - slots >= slots_per_weight * account.key.weight

    if beyond(newcomer.account, 0):
        return None
    givers = {account for account in accounts if beyond(account, 1)}
    if not givers:
        return None
    victim = None
    for sequence in live.running.values():
        target = sequence.target
        if sequence.account not in givers or target is None or sequence.sequence_id in target.in_flight:
            continue
        if positions is not None and (target.draining or not target.has_room(positions)):
            continue
        if victim is None or sequence.rank > victim.rank:
            victim = sequence
    return victim
