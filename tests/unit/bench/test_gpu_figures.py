"""The arithmetic of the GPU benchmark, on records written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from bench.gpu import device
from bench.gpu.driver import Output, RunRecord, StepRecord
from bench.gpu.figures import StreamingLimit, compare_logits, output_digest, summarise
from scheduler.messages import Role

LIMIT = StreamingLimit(weight_bytes=16_000_000_000, bytes_per_second=4e12)


def step(role: Role, total: float, rows: int = 1, verified: int = 0, packed: int = 1, padding: int = 0) -> StepRecord:
    return StepRecord(role, total, total / 8, total / 2, total / 4, rows, verified, packed, padding)


def test_figures_of_a_cell() -> None:
    run = RunRecord(
        outputs={
            0: Output([1, 2, 3, 4], rounds=[(4, 2, 3)]),
            1: Output([5, 6], rounds=[(0, 0, 1)]),
            2: Output([7, 8, 9], rounds=[(4, 0, 1), (4, 0, 1)]),
        },
        steps=[
            step(Role.TARGET, 0.8, rows=3, packed=48),
            step(Role.TARGET, 0.5, rows=3, verified=2, packed=40),  # a chunk of prefill rides along
            step(Role.TARGET, 0.016, rows=2, verified=2, packed=10, padding=6),
            step(Role.TARGET, 0.008, rows=1, verified=1, packed=5, padding=3),
            step(Role.TARGET, 0.020, rows=3, verified=3, packed=3, padding=5),
            step(Role.DRAFT, 0.2),
            step(Role.DRAFT, 0.1),
        ],
        seconds=2.0,
        core_seconds=0.25,
    )
    figures = summarise(run, {0: [1, 2, 3, 4], 2: [7, 8, 0]}, LIMIT)
    assert figures.tokens == 9
    assert figures.tokens_per_second == pytest.approx(4.5)
    assert (figures.target_steps, figures.decode_steps, figures.draft_steps) == (5, 3, 2)
    assert figures.target_step_seconds == pytest.approx(0.016)
    assert figures.target_prepare_seconds == pytest.approx(0.002)
    assert figures.target_forward_seconds == pytest.approx(0.008)
    assert figures.target_sample_seconds == pytest.approx(0.004)
    # 16 GB at 4 TB/s are 4 ms, a quarter of 16 ms.
    assert figures.streaming_share == pytest.approx(0.25)
    assert figures.rows_per_step == pytest.approx(2.0)
    assert figures.packed_rows_per_step == pytest.approx(6.0)
    assert figures.padding_rows_per_step == pytest.approx(14 / 3)
    assert figures.rounds == 4
    assert figures.committed_per_round == pytest.approx(6 / 4)
    assert (figures.drafted, figures.accepted) == (12, 2)
    assert figures.draft_step_seconds == pytest.approx(0.15)
    assert figures.target_share == pytest.approx(1.344 / 2)
    assert figures.draft_share == pytest.approx(0.15)
    assert figures.core_share == pytest.approx(0.125)
    assert (figures.compared_outputs, figures.equal_outputs) == (2, 1)
    assert figures.output_digests == [output_digest([1, 2, 3, 4]), output_digest([7, 8, 9])]


def test_a_cell_that_only_prefilled_has_no_step_time() -> None:
    run = RunRecord({0: Output([1])}, [step(Role.TARGET, 0.1, packed=16)], seconds=0.1)
    figures = summarise(run, {}, LIMIT)
    assert figures.target_step_seconds is None
    assert figures.streaming_share is None
    assert figures.committed_per_round is None
    assert figures.tokens_per_second == pytest.approx(10)


def test_an_output_that_is_longer_or_shorter_is_not_equal() -> None:
    run = RunRecord({0: Output([1, 2, 3])}, seconds=1.0)
    assert summarise(run, {0: [1, 2]}, LIMIT).equal_outputs == 0
    assert summarise(run, {0: [1, 2, 3, 4]}, LIMIT).equal_outputs == 0
    assert summarise(run, {0: [1, 2, 3]}, LIMIT).equal_outputs == 1


def test_logits_are_compared_up_to_the_first_token_that_differs() -> None:
    expected = {
        0: Output([1, 2, 3], [10, 20, 30]),
        1: Output([1, 2, 3, 4], [11, 21, 31, 41]),
        2: Output([5, 6], [12, 22]),
    }
    found = {
        0: Output([1, 2, 3], [10, 20, 30]),
        1: Output([1, 9, 3, 4], [11, 99, 31, 41]),  # what follows the 9 is another text
        2: Output([5, 6], [99, 22]),
        3: Output([7], [13]),
    }
    comparison = compare_logits(expected, found)
    assert (comparison.sequences, comparison.equal_sequences) == (3, 2)
    assert (comparison.compared_logits, comparison.equal_logits) == (3 + 2 + 2, 3 + 1 + 1)
    assert comparison.first_unequal == (1, 1)
    assert compare_logits(expected, expected).first_unequal is None


def test_logits_without_digests_are_not_taken_for_equal() -> None:
    with pytest.raises(ValueError, match="sequence 0 has 0 digests, must have 2"):
        compare_logits({0: Output([1, 2], [10, 20])}, {0: Output([1, 2])})


@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 2), ("float32", 4)])
def test_weights_read_by_a_pass_leave_out_the_embedding(tmp_path: Path, dtype: str, item: int) -> None:
    embedding, head = {"model.embed_tokens.weight": torch.zeros(50, 4)}, {"lm_head.weight": torch.zeros(50, 4)}
    layer = {"model.layers.0.mlp.weight": torch.zeros(3, 4), "model.norm.weight": torch.zeros(4)}
    save_file(embedding | layer, tmp_path / "model-1.safetensors")
    # An embedding that is the head too is read as a whole.
    assert device.weight_bytes_per_pass(tmp_path, dtype) == (200 + 12 + 4) * item
    save_file(head, tmp_path / "model-2.safetensors")
    assert device.weight_bytes_per_pass(tmp_path, dtype) == (200 + 12 + 4) * item
    with pytest.raises(ValueError, match="holds no weights"):
        device.weight_bytes_per_pass(tmp_path / "nothing", dtype)


def test_a_copy_counts_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each copy takes 2 s on this clock, the first one 100 s.
    times = iter([0.0, 100.0, *(value for index in range(7) for value in (200.0 + index, 202.0 + index))])
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert device.copy_bytes_per_second("cpu") == pytest.approx(2 * (64 << 20) / 2)
    assert next(times, None) is None


def test_the_limit_says_what_it_is_made_of() -> None:
    assert json.loads(json.dumps(LIMIT.to_json())) == {
        "weight_bytes": 16_000_000_000,
        "bytes_per_second": 4e12,
        "step_seconds": pytest.approx(0.004),
    }
