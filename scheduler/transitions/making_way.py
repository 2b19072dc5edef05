"""Which running sequences give up their places for a key that runs few."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.state.fleet import Fleet
from scheduler.state.key_accounts import KeyAccount
from scheduler.state.live_set import LiveSet
from scheduler.state.workers import Sequence, TargetWorker

_TIMES = 2
"""More than 1, so that keys which run about their parts do not take turns in computing the same tokens again."""


@dataclass(frozen=True, slots=True)
class Way:
    """Without the sequences in `leaving`, all of one key, the target has room for another one."""

    target: TargetWorker
    leaving: list[Sequence]

    @property
    def busy(self) -> int:
        """How many of them have a row in flight. They leave once it is answered, so that no answer is lost, and a row
        that kills its target is known to be one of the target's (blame.py)."""
        return sum(one.sequence_id in self.target.in_flight for one in self.leaving)


def find_way(sequence: Sequence, positions: int, live: LiveSet, fleet: Fleet) -> Way | None:
    """How a target can take a waiting sequence in, with `positions`: the soonest, and then with the fewest to leave.

    The key that runs most for its weight gives up places, but keeps one, and `_TIMES` as many for its weight as the
    waiting sequence's key runs. None if nothing can be had so.
    """
    account = sequence.account
    spare = {one: one.running - _kept(one, account) for one in live.accounts if one is not account and one.running > 1}
    most = max((one for one in spare if spare[one] > 0), key=lambda one: one.share, default=None)
    if most is None:
        return None
    ways = []
    for target in fleet.targets.values():
        if target.draining or positions > target.capacity:
            continue
        count = max(len(live.running) - fleet.max_running, len(target.sequences) - fleet.max_per_target) + 1
        way = Way(target, _leaving(target, most, count, positions))
        if 0 < len(way.leaving) <= spare[most]:
            ways.append(way)
    return min(ways, key=lambda way: (way.busy, len(way.leaving)), default=None)


def _kept(one: KeyAccount, waiting: KeyAccount) -> int:
    """How many sequences a key keeps running where another one's waits."""
    return max(1, math.ceil(_TIMES * waiting.share * one.key.weight))


def _leaving(target: TargetWorker, account: KeyAccount, count: float, positions: int) -> list[Sequence]:
    """At least `count` of the key's sequences on the target, without which there is room for `positions` more: those
    without a row in flight first, then the last in rank. Empty where there is no room without all of them."""
    candidates = [one for one in target.sequences.values() if one.account is account and one.target is target]
    candidates.sort(key=lambda one: (one.sequence_id not in target.in_flight, one.rank), reverse=True)
    pages = 0
    for place, one in enumerate(candidates, 1):
        pages += target.kv[one.sequence_id].pages
        if place >= count and target.has_room(positions, place, pages):
            return candidates[:place]
    return []
