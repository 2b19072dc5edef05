"""The in-process driver of the GPU benchmark does not wait for what never comes."""

from __future__ import annotations

import pytest

from bench.gpu.driver import InProcessCell
from scheduler.config import SchedulerConfig
from scheduler.messages import SequenceRequest


def cell_without_workers() -> InProcessCell:
    return InProcessCell(SchedulerConfig(batch_size=1, max_running=1), {}, scheduler_epoch=1)


def test_a_cell_without_a_target_is_at_a_standstill() -> None:
    with pytest.raises(RuntimeError, match="standstill: 2 sequences never ended"):
        cell_without_workers().run([SequenceRequest(0, (1, 2), 4), SequenceRequest(1, (3,), 4)])


def test_a_refusal_is_told() -> None:
    with pytest.raises(RuntimeError, match="sequence 7 was refused: prompt is empty"):
        cell_without_workers().run([SequenceRequest(7, (), 4)])


def test_nothing_to_do_takes_no_step() -> None:
    record = cell_without_workers().run([])
    assert record.outputs == {}
    assert record.steps == []
