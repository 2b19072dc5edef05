"""Which draft tokens to leave out where a step has no room for all."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Items


def most_promising(chances: Items[Items[float]], room: int) -> list[int]:
    """How many leading tokens of each sequence to verify if only `room` tokens can be: those most likely accepted.

    A token is worth nothing without those before it, and is never likelier to be accepted than they are. So taking the
    likeliest next token, one at a time, is best (TETRIS, arXiv 2502.15197, section 4).
    """
    lengths = [0] * len(chances)
    heap = [(-found[0], index) for index, found in enumerate(chances) if found]
    heapq.heapify(heap)
    while heap and room > 0:
        _, index = heapq.heappop(heap)
        lengths[index] += 1
        room -= 1
        if lengths[index] < len(chances[index]):
            heapq.heappush(heap, (-chances[index][lengths[index]], index))
    return lengths
