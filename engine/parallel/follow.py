"""The side of all ranks but the first: they follow the orders of rank 0 with their part of the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from engine.errors import one_line
from engine.kv.groups import page_groups
from engine.kv.paged_kv import PagedKvStore
from engine.kv.pages import PagePool
from engine.models.loaded_model import LoadedModel
from engine.parallel.orders import Order, pass_from_numbers, plan_from_numbers
from engine.parallel.ranks import Ranks
from engine.passes.runner import ModelRunner

logger = logging.getLogger(__name__)


def follow(loaded: LoadedModel, ranks: Ranks) -> None:
    """Follows rank 0 until it is gone. Raises whatever a pass raises."""
    runner: ModelRunner | None = None
    while True:
        try:
            order, *numbers = ranks.receive()
        except RuntimeError as error:
            logger.info("rank 0 is gone: %s", one_line(error))
            return
        if order == Order.NEW_RUNNER:
            runner = None  # its pages go before those of the next come
            plan = plan_from_numbers(numbers)
            pool = PagePool(plan.pages, plan.page_size, page_groups(plan.windows))
            runner = loaded.runner(pool, plan.form, plan.row_counts)
        elif runner is None:
            raise RuntimeError(f"order {order} came before the first runner")
        else:
            _do(Order(order), numbers, runner, ranks)


def _do(order: Order, numbers: Sequence[int], runner: ModelRunner, ranks: Ranks) -> None:
    if order is Order.PASS:
        runner.run(list(pass_from_numbers(numbers)))
        return
    if order is Order.SCRUB:
        group, first_offset, *places = numbers
        runner.kv.scrub(group, places, first_offset)
        return
    store = PagedKvStore(runner.kv, "", b"")
    size = store.layout.page_bytes
    if order is Order.READ_PAGE:
        ranks.parts(torch.frombuffer(bytearray(store.read_page(numbers[0])), dtype=torch.uint8))
    elif order is Order.WRITE_PAGE:
        whole = ranks.share(torch.empty(ranks.size * size, dtype=torch.uint8))
        store.write_page(numbers[0], whole[ranks.rank * size :][:size].numpy().tobytes())
