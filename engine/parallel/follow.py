"""The side of all ranks but the first: they follow the orders of rank 0 with their part of the model."""

from __future__ import annotations

import logging
from typing import Any

import torch

from spool.engine.errors import one_line
from spool.engine.kv.groups import page_groups
from spool.engine.kv.paged_kv import PagedKvStore
from spool.engine.kv.pages import PagePool, PageRun, PageTable
from spool.engine.models.loaded_model import LoadedModel
from spool.engine.parallel.lead import as_tensor
from spool.engine.parallel.ranks import Ranks
from spool.engine.passes.layout import BatchedSequence
from spool.engine.passes.runner import ModelRunner

logger = logging.getLogger(__name__)


def follow(loaded: LoadedModel, ranks: Ranks) -> None:
    """Follows rank 0 until it is gone. Raises whatever a pass raises."""
    runner: ModelRunner | None = None
    while True:
        try:
            order = ranks.receive()
        except RuntimeError as error:
            logger.info("rank 0 is gone: %s", one_line(error))
            return
        match order:
            case ["runner", pages, page_size, windows, row_counts]:
                runner = None  # its pages go before those of the next come
                pool = PagePool(pages, page_size, page_groups(windows))
                runner = loaded.runner(pool, row_counts)
            case _ if runner is not None:
                _do(order, runner, ranks)
            case _:
                raise RuntimeError(f"order {order[0]} came before the first runner")


def _do(order: list[Any], runner: ModelRunner, ranks: Ranks) -> None:
    store = PagedKvStore(runner.kv, "", b"")
    match order:
        case ["pass", sequences]:
            runner.run([_sequence(*one) for one in sequences])
        case ["scrub", group, places, first_offset]:
            runner.kv.scrub(group, places, first_offset)
        case ["read pages", pages]:
            ranks.parts(as_tensor(store.read_pages(pages)))
        case ["write pages", pages]:
            shape = (len(pages), ranks.size, store.layout.page_bytes)
            whole = ranks.share(torch.empty(shape, dtype=torch.uint8))
            store.write_pages(pages, [page.tobytes() for page in whole[:, ranks.rank].numpy()])
        case _:
            raise ValueError(f"there is no order {order[0]}")


def _sequence(
    runs: list[tuple[list[int], int]], length: int, tokens: list[int], logits: int, first: int, stop: int
) -> BatchedSequence:
    table = PageTable([PageRun(pages, freed) for pages, freed in runs], length)
    return BatchedSequence(table, tokens, logits, range(first, stop))
