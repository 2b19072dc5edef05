"""Layers by how long their KV is needed: of all positions, or of those that a sliding window still sees. No torch here.

Pages of one pool serve all of them. A page holds `page_size` positions of the largest group of layers, and of a smaller
one several times as many, so that nearly all of its memory is used by whichever group it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageGroup:
    """`layers` of a model, by number (none: all), that see the last `window` positions (None: all). A page holds
    `slices` times `page_size` positions of theirs."""

    layers: tuple[int, ...] = ()
    slices: int = 1
    window: int | None = None

    def left_behind(self, length: int) -> int:
        """Positions, from the first on, that none from `length` on sees."""
        return 0 if self.window is None else max(0, length + 1 - self.window)


def page_groups(windows: Sequence[int | None]) -> tuple[PageGroup, ...]:
    """Groups of layers with these windows, those that see everything first; without any, one of all layers."""
    if not windows:
        return (PageGroup(),)
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    largest = max(map(len, by_window.values()))
    order = sorted(by_window, key=lambda window: window or 0)
    return tuple(PageGroup(tuple(by_window[w]), round(largest / len(by_window[w])), w) for w in order)


def windows_of(groups: Sequence[PageGroup]) -> tuple[int | None, ...]:
    """What `page_groups` makes these groups of."""
    windows = {layer: group.window for group in groups for layer in group.layers}
    return tuple(windows[layer] for layer in sorted(windows))


def lanes_of(groups: Sequence[PageGroup], layers: int) -> int:
    """How many times `page_size` positions of one layer a page holds, for a model of so many layers."""
    return max((len(group.layers) or layers) * group.slices for group in groups)
