"""Rank 0's side of a worker of several ranks: the others do with their parts what it does with its own.

An order is a list of JSON that begins with its name. Ranks hold the same pages, and passes are functions of their
sequences alone, so an order for a pass holds tokens, lengths and pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from spool.engine.errors import one_line
from spool.engine.kv.groups import windows_of
from spool.engine.kv.kv_store import KvStore
from spool.engine.kv.pages import PagePool
from spool.engine.parallel.ranks import Ranks
from spool.engine.passes.layout import BatchedSequence

Broken = Callable[[str], None]
"""Called where the ranks cannot go on together, with the reason; does not return."""


class Lead:
    """Sends orders to the other ranks, before rank 0 follows the same order.

    An error after an order leaves the ranks in different states, in which they can compute nothing any more: `broken`
    is called, which ends the process.
    """

    def __init__(self, ranks: Ranks, broken: Broken, sums_as_one: bool) -> None:
        """`sums_as_one`: what shards.py says of the model."""
        self.ranks = ranks
        self.sums_as_one = sums_as_one
        self._broken = broken

    def new_runner(self, pool: PagePool, row_counts: Sequence[int]) -> None:
        """Passes and pages of later orders are those of the newest runner."""
        with self._together("runner", pool.total_pages, pool.page_size, windows_of(pool.groups), [*row_counts]):
            pass

    @contextmanager
    def passing(self, sequences: Sequence[BatchedSequence]) -> Iterator[None]:
        """Around a pass over the sequences."""
        given = []
        for sequence in sequences:
            table, scored = sequence.table, sequence.scored
            runs = [(run.pages, run.freed) for run in table.runs]
            given.append((runs, table.length, list(sequence.tokens), sequence.logits, scored.start, scored.stop))
        with self._together("pass", given):
            yield

    def scrub(self, group: int, places: Sequence[int], first_offset: int) -> None:
        with self._together("scrub", group, [*places], first_offset):
            pass

    def read_pages(self, pages: Sequence[int], own: Sequence[bytes]) -> list[bytes]:
        """The bytes of every rank's pages, of each page one rank's after the other; `own` are those of this rank."""
        with self._together("read pages", [*pages]):
            parts = self.ranks.parts(as_tensor(own))
        return [page.tobytes() for page in parts.transpose(0, 1).flatten(1).numpy()]

    def write_pages(self, pages: Sequence[int], contents: Sequence[bytes]) -> list[bytes]:
        """Gives every rank its part of the bytes of pages; returns this rank's."""
        with self._together("write pages", [*pages]):
            self.ranks.share(as_tensor(contents))
        return [data[: len(data) // self.ranks.size] for data in contents]

    @contextmanager
    def _together(self, *order: Any) -> Iterator[None]:
        try:
            self.ranks.send(order)
            yield
        except Exception as error:
            self._broken(one_line(error))
            raise


class LedKvStore:
    """The pages of all ranks as those of one worker: a page of each rank after the other (engine/kv/kv_store.py)."""

    def __init__(self, own: KvStore, lead: Lead) -> None:
        self.layout = replace(own.layout, ranks=lead.ranks.size)
        self._own = own
        self._lead = lead

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        return self._lead.read_pages(pages, self._own.read_pages(pages))

    def write_pages(self, pages: Sequence[int], contents: Sequence[bytes]) -> None:
        self.layout.check(contents)
        self._own.write_pages(pages, self._lead.write_pages(pages, contents))


def as_tensor(contents: Sequence[bytes]) -> torch.Tensor:
    """Pages of one size, uint8 `[pages, bytes]`."""
    return torch.frombuffer(bytearray().join(contents), dtype=torch.uint8).view(len(contents), -1)
