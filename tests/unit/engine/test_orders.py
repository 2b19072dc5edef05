"""Orders of rank 0 to the others, and tensors that ranks exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spool.engine.parallel.ranks import Ranks, join_ranks

SIZE = 3


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_one_order(tmp_path: Path, dtype: torch.dtype) -> None:
    """Parts whose sum depends on its order: 2^30 and its opposite swallow what is added between them."""
    parts = torch.tensor([[2.0**30, 1.0], [3.0, 2.0**30], [-(2.0**30), -(2.0**30)]], dtype=dtype)
    in_order = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
    sums = on_every_rank(tmp_path, lambda ranks: ranks.total(parts[ranks.rank]))
    assert all(torch.equal(total, in_order) for total in sums)  # type: ignore[arg-type]
    backwards = (parts[2].float() + parts[1].float() + parts[0].float()).to(dtype)
    assert not torch.equal(in_order, backwards)
