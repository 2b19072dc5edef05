"""Rank 0's side of a worker of several ranks: the others do with their parts what it does with its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from engine.errors import one_line
from engine.kv.kv_store import KvStore
from engine.parallel.orders import Order, RunnerPlan, pass_to_numbers, plan_to_numbers
from engine.parallel.ranks import Ranks
from engine.passes.layout import BatchedSequence

Broken = Callable[[str], None]
"""Called where the ranks cannot go on together, with the reason; does not return."""


class Lead:
    """Sends orders to the other ranks, before rank 0 follows the same order.

    An error after an order leaves the ranks in different states, in which they can compute nothing any more: `broken`
    is called, which ends the process.
    """

    def __init__(self, ranks: Ranks, broken: Broken) -> None:
        self.ranks = ranks
        self._broken = broken

    def new_runner(self, plan: RunnerPlan) -> None:
        with self._together(Order.NEW_RUNNER, plan_to_numbers(plan)):
            pass

    @contextmanager
    def passing(self, sequences: Sequence[BatchedSequence]) -> Iterator[None]:
        """Around a pass over the sequences."""
        with self._together(Order.PASS, pass_to_numbers(sequences)):
            yield

    def scrub(self, group: int, places: Sequence[int], first_offset: int) -> None:
        with self._together(Order.SCRUB, [group, first_offset, *places]):
            pass

    def read_page(self, page: int, own: bytes) -> bytes:
        """The bytes of every rank's page, one rank's after the other; `own` are those of this rank."""
        with self._together(Order.READ_PAGE, [page]):
            parts = self.ranks.parts(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        return parts.numpy().tobytes()

    def write_page(self, page: int, data: bytes) -> bytes:
        """Gives every rank its part of the bytes of a page; returns this rank's."""
        with self._together(Order.WRITE_PAGE, [page]):
            self.ranks.share(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return data[: len(data) // self.ranks.size]

    @contextmanager
    def _together(self, order: Order, numbers: Sequence[int]) -> Iterator[None]:
        try:
            self.ranks.send([order, *numbers])
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

    def read_page(self, page: int) -> bytes:
        return self._lead.read_page(page, self._own.read_page(page))

    def write_page(self, page: int, data: bytes) -> None:
        if len(data) != self.layout.page_bytes:
            raise ValueError(f"a page of {len(data)} bytes came, must be of {self.layout.page_bytes}")
        self._own.write_page(page, self._lead.write_page(page, data))
