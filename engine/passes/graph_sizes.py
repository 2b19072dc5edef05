"""Which row counts have a CUDA graph. Knows no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Each costs seconds of loading, and a pass is padded to the next. Larger passes take longer than launching their
# kernels, with or without a graph: the 256 sequences that run by default decode on one, 128 verify three tokens each.
_WANTED = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)

MOST_ROWS = _WANTED[-1]
MOST_GRAPHS = len(_WANTED)


def graphed_row_counts(row_counts: Sequence[int]) -> tuple[int, ...]:
    """Those of `row_counts` (ascending) that get a graph: up to `MOST_GRAPHS`, spread evenly."""
    counts = [count for count in row_counts if count <= MOST_ROWS]
    if not counts:
        return ()
    return tuple(sorted({counts[min(bisect_left(counts, wanted), len(counts) - 1)] for wanted in _WANTED}))
