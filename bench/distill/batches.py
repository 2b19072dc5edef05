"""Which rows a training step reads: every row once in each pass over the shards, in an order of its own."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from bench.distill.seeds import derived_seed
from bench.distill.shards import Rows, Shard, joined


class Batches:
    """Batches of rows of one length with about `tokens` tokens; batch i depends on the shards, the seed and i alone."""

    def __init__(self, shards: Sequence[Shard], tokens: int, seed: int) -> None:
        self._shards = shards
        self._tokens = tokens
        self._seed = seed
        self._places: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, shard in enumerate(shards):
            self._places[shard.length] += [(index, row) for row in range(shard.rows)]
        self._pass_number = -1
        self._order: list[list[tuple[int, int]]] = []
        self._begin_pass(0)

    def __getitem__(self, index: int) -> Rows:
        number, place = divmod(index, len(self._order))
        self._begin_pass(number)
        return joined(self._shards[shard].read(row, 1) for shard, row in self._order[place])

    def _begin_pass(self, number: int) -> None:
        if number == self._pass_number:
            return
        shuffle = random.Random(derived_seed(self._seed, "pass", number)).shuffle
        self._pass_number, self._order = number, []
        for length, places in sorted(self._places.items()):
            shuffled, count = list(places), max(1, self._tokens // length)
            shuffle(shuffled)
            self._order += [shuffled[first : first + count] for first in range(0, len(shuffled), count)]
        shuffle(self._order)
