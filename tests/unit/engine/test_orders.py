"""Orders of rank 0 to the others, and tensors that ranks exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from engine.attention.backends import attention_forms, unrestricted_form
from engine.kv.pages import PageTable
from engine.parallel.orders import RunnerPlan, pass_from_numbers, pass_to_numbers, plan_from_numbers, plan_to_numbers
from engine.parallel.ranks import Ranks, join_ranks
from engine.passes.layout import BatchedSequence

SIZE = 3


def test_runner_orders_arrive_whole() -> None:
    for form in (None, unrestricted_form(16), *attention_forms(8)):
        plan = RunnerPlan(100, 16, form, () if form is None else (1, 2, 8))
        assert plan_from_numbers(plan_to_numbers(plan)) == plan


def test_pass_orders_arrive_whole() -> None:
    sequences = [
        BatchedSequence(PageTable([7, 3, 9], 33), [5, 6, 7], 2),
        BatchedSequence(PageTable([1], 1), [0], 0),
        BatchedSequence(PageTable([2, 4], 20), list(range(20)), 1, range(3, 9)),
    ]
    told = list(pass_from_numbers(pass_to_numbers(sequences, 16)))
    assert [(one.table.pages, one.table.length) for one in told] == [([7, 3, 9], 33), ([1], 1), ([2, 4], 20)]
    assert [astuple(one)[1:] for one in told] == [astuple(one)[1:] for one in sequences]
    # A page that the pass does not reach.
    (cut,) = pass_from_numbers(pass_to_numbers([BatchedSequence(PageTable([7, 3], 16), [5], 1)], 16))
    assert cut.table.pages == [7]


def on_every_rank(folder: Path, work: Callable[[Ranks], object]) -> list[object]:
    """What `work` gives on each rank, all of them threads of this process."""
    given: list[object] = [None] * SIZE

    def run(rank: int) -> None:
        given[rank] = work(join_ranks(folder, rank, SIZE, torch.device("cpu")))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return given


def test_messages_of_any_length_arrive(tmp_path: Path) -> None:
    messages = [list(range(count)) for count in (1, 2047, 2048, 5000, 0, 3)]

    def work(ranks: Ranks) -> list[list[int]]:
        if ranks.rank:
            return [ranks.receive() for _ in messages]
        for message in messages:
            ranks.send(message)
        return messages

    assert on_every_rank(tmp_path, work) == [messages] * SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_one_order(tmp_path: Path, dtype: torch.dtype) -> None:
    """Parts whose sum depends on its order: 2^30 and its opposite swallow what is added between them."""
    parts = torch.tensor([[2.0**30, 1.0], [3.0, 2.0**30], [-(2.0**30), -(2.0**30)]], dtype=dtype)
    in_order = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
    sums = on_every_rank(tmp_path, lambda ranks: ranks.total(parts[ranks.rank]))
    assert all(torch.equal(total, in_order) for total in sums)  # type: ignore[arg-type]
    backwards = (parts[2].float() + parts[1].float() + parts[0].float()).to(dtype)
    assert not torch.equal(in_order, backwards)


def test_logits_are_gathered_on_the_first_rank(tmp_path: Path) -> None:
    gathered = on_every_rank(tmp_path, lambda ranks: ranks.side_by_side(torch.full((2, 2), float(ranks.rank))))
    assert gathered[0].tolist() == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 2  # type: ignore[attr-defined]
