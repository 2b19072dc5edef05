"""Which running sequences are preempted for the waiting sequence of a key that runs few."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from spool.scheduler.state.fleet import Fleet
from spool.scheduler.state.key_accounts import KeyAccount
from spool.scheduler.state.live_set import LiveSet
from spool.scheduler.state.workers import Sequence, TargetWorker

_SHARE_RATIO = 2
"""A key gives up places only while it runs more than this many times as much for its weight as the waiting key. Above
1, so that keys with about equal shares do not preempt each other in turn and compute the same tokens again."""


@dataclass(frozen=True, slots=True)
class Preemption:
    """Without the `victims`, all of one key, the target has room for another sequence."""

    target: TargetWorker
    victims: list[Sequence]

    @property
    def busy(self) -> int:
        """Victims with a row in flight. They are preempted once it is answered, so that no answer is lost, and a row
        that kills its target is known to be one of the target's (blame.py)."""
        return sum(one.sequence_id in self.target.in_flight for one in self.victims)


def find_preemption(
    sequence: Sequence, positions: int, live: LiveSet, fleet: Fleet, kept_for_others: Collection[str] = ()
) -> Preemption | None:
    """How a target can take a waiting sequence in, with `positions`: the soonest, and then with the fewest victims.

    The key that runs most for its weight gives up places, but keeps one, and `_SHARE_RATIO` times as many for its
    weight as the waiting sequence's key runs. None if no key has places to give up, or if these would not suffice.
    `kept_for_others` as in `Fleet.pick_target`.
    """
    account = sequence.account
    spare = {one: one.running - _kept(one, account) for one in live.accounts if one is not account and one.running > 1}
    giver = max((one for one in spare if spare[one] > 0), key=lambda one: one.share, default=None)
    if giver is None:
        return None
    found = []
    for target in fleet.takers(sequence):
        if target.draining or target.spec.fingerprint in kept_for_others or positions > target.capacity:
            continue
        beyond = len(live.running) - fleet.ending - fleet.max_running
        count = max(beyond, len(target.sequences) - fleet.max_per_target) + 1
        preemption = Preemption(target, _victims(target, giver, count, positions))
        if 0 < len(preemption.victims) <= spare[giver]:
            found.append(preemption)
    return min(found, key=lambda preemption: (preemption.busy, len(preemption.victims)), default=None)


def _kept(one: KeyAccount, waiting: KeyAccount) -> int:
    """How many sequences a key keeps running where another one's waits."""
    return max(1, math.ceil(_SHARE_RATIO * waiting.share * one.key.weight))


def _victims(target: TargetWorker, account: KeyAccount, count: float, positions: int) -> list[Sequence]:
    """At least `count` of the key's sequences on the target, without which there is room for `positions` more: those
    without a row in flight first, then the last in rank. Empty where even all of them would not make room."""
    candidates = [one for one in target.sequences.values() if one.account is account and one.target is target]
    candidates.sort(key=lambda one: (one.sequence_id not in target.in_flight, one.rank), reverse=True)
    pages = 0
    for place, one in enumerate(candidates, 1):
        pages += target.kv[one.sequence_id].pages
        if place >= count and target.has_room(positions, place, pages):
            return candidates[:place]
    return []
