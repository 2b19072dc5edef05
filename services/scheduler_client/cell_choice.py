"""Which cell computes a sequence: one that has the beginning of its prompt, unless that cell has more than its part."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# A shorter beginning is computed faster than it is looked for; a longer one distinguishes cells no better.
PAGE_TOKENS = 64
LEADING_PAGES = 64

BALANCE = 1.25
"""How many times its even part of all sequences a cell may get. Consistent hashing with bounded loads (Mirrokni,
Thorup and Zadimoghaddam, arXiv 1608.01350) has such a bound: a lower one spreads prompts that belong together."""

# About 10 MB.
_REMEMBERED_PAGES = 1 << 16


@dataclass(frozen=True, slots=True)
class CellState:
    """A cell as a gateway sees it now: its target workers, and its unfinished sequences."""

    number: int
    targets: int
    sequences: int

    @property
    def load(self) -> float:
        return self.sequences / max(self.targets, 1)


class CellChoice:
    """Remembers which cells were given which beginnings of prompts. Several gateways need not know of each other."""

    def __init__(self) -> None:
        self._given: OrderedDict[bytes, frozenset[int]] = OrderedDict()

    def choose(self, scope: bytes, prompt: Sequence[int], cells: Sequence[CellState]) -> int:
        """The number of one of the `cells`, at least one, which is taken to compute the prompt from now on.

        Of the cells that have targets and are not above their part of all sequences, it is the one with the longest
        beginning of the prompt in its cache scope. Where none has any, scope and first page name two of them, the same
        ones at every gateway, and the one with less work gets it.
        """
        pages = list(_pages(scope, prompt))
        fair = _within_bound([cell for cell in cells if cell.targets] or cells)
        first = pages[0] if pages else _digest(scope, prompt)
        fair.sort(key=lambda cell: _weight(first, cell.number), reverse=True)
        known = self._known_pages(pages)
        longest = max(known.get(cell.number, 0) for cell in fair)
        nearest = [cell for cell in fair if known.get(cell.number, 0) == longest] if longest else fair[:2]
        chosen = min(nearest, key=lambda cell: cell.load).number
        self._remember(pages, chosen)
        return chosen

    def forget(self, cell: int) -> None:
        """What the cell had is gone."""
        for page, cells in list(self._given.items()):
            if cells == {cell}:
                del self._given[page]
            elif cell in cells:
                self._given[page] = cells - {cell}

    def _known_pages(self, pages: Sequence[bytes]) -> dict[int, int]:
        """By cell, how many of the leading pages it was given."""
        known: dict[int, int] = {}
        for count, page in enumerate(pages, 1):
            cells = self._given.get(page)
            if cells is None:
                break
            known.update(dict.fromkeys(cells, count))
        return known

    def _remember(self, pages: Sequence[bytes], cell: int) -> None:
        # From the end, so that the first page, without which the others are of no use, is the last to be forgotten.
        for page in reversed(pages):
            self._given[page] = self._given.get(page, frozenset()) | {cell}
            self._given.move_to_end(page)
        while len(self._given) > _REMEMBERED_PAGES:
            self._given.popitem(last=False)


def _within_bound(cells: Sequence[CellState]) -> list[CellState]:
    """Those that with one more sequence are not above their bound: at least one, as the bounds add up to more."""
    sequences = 1 + sum(cell.sequences for cell in cells)
    targets = sum(max(cell.targets, 1) for cell in cells)
    return [
        cell for cell in cells if cell.sequences + 1 <= math.ceil(BALANCE * sequences * max(cell.targets, 1) / targets)
    ]


def _pages(scope: bytes, prompt: Sequence[int]) -> Iterator[bytes]:
    """A digest for each of the leading whole pages, which tells of all tokens up to the page's end."""
    digest = scope
    for page in range(min(len(prompt) // PAGE_TOKENS, LEADING_PAGES)):
        digest = _digest(digest, prompt[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS])
        yield digest


def _digest(before: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(before + array("I", tokens).tobytes(), digest_size=16).digest()


def _weight(page: bytes, cell: int) -> bytes:
    """Rendezvous hashing: the cells with the highest weights stay the same when other cells come and go."""
    return hashlib.blake2b(page, key=cell.to_bytes(4), digest_size=8).digest()
