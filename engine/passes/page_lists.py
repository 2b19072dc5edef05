"""Lists of the pages of sequences that stay on the device from pass to pass: each pass writes what has changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from spool.engine.attention.backends import Span, tile_pages
from spool.engine.passes.device import pinned


class PageLists:
    """One list for each sequence, in the order of its positions, of one group of layers. What is there is compared with
    what a pass needs, so that a span's `owner` has but to be its own most of the time."""

    def __init__(self, lists: int, longest: int, page_size: int, device: torch.device) -> None:
        """For passes of up to `lists` sequences, none of more than `longest` positions."""
        self._page_size = page_size
        self._width = -(-longest // page_size)
        self._lists = lists
        # Place and content of each list, the one that was needed least recently first.
        self._kept: OrderedDict[int, tuple[int, list[int]]] = OrderedDict()
        self.pages = torch.zeros(lists * self._width, dtype=torch.int64, device=device)
        """All lists, one after the other."""

    def first_places(self, spans: Sequence[Span]) -> list[int]:
        """Where the lists of the spans begin, once those are on the device. Of freed pages that a kernel may look at,
        others of the same sequence are in the list."""
        first_places: list[int] = []
        places: list[int] = []
        pages: list[int] = []
        for span in spans:
            place, kept = self._list_of(span.owner)
            begin = max(0, span.freed - tile_pages(self._page_size))
            wanted = [span.pages[0]] * (span.freed - begin)
            wanted += span.pages[: -(-(span.start + span.rows) // self._page_size) - span.freed]
            end = begin + len(wanted)
            if kept[begin:end] != wanted:
                # No page: what an earlier list left there is not known.
                kept += [-1] * (end - len(kept))
                changed = [index for index, page in enumerate(wanted, begin) if kept[index] != page]
                places += [place + index for index in changed]
                pages += [wanted[index - begin] for index in changed]
                kept[begin:end] = wanted
            first_places.append(place)
        if places:
            on_device = pinned([*places, *pages], self.pages.device).to(self.pages.device, non_blocking=True)
            self.pages.index_copy_(0, *on_device.view(2, -1))
        return first_places

    def _list_of(self, owner: int) -> tuple[int, list[int]]:
        if owner in self._kept:
            self._kept.move_to_end(owner)
        elif len(self._kept) < self._lists:
            self._kept[owner] = len(self._kept) * self._width, []
        else:
            # Those of the pass at work are the last ones.
            _, (place, _) = self._kept.popitem(last=False)
            self._kept[owner] = place, []
        return self._kept[owner]
