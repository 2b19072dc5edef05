"""The parts of `python -m bench.gpu`: findings on disk, deadlines, summaries of traces, and the pair in memory."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from bench.gpu.findings import Block, Findings, run_block
from bench.gpu.pair import SHAPES, Pair
from bench.gpu.trace import STEPS, summary


def kept(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_block_that_fails_or_takes_too_long_is_a_finding(tmp_path: Path) -> None:
    told: list[str] = []
    findings = Findings(tmp_path / "findings.jsonl", told.append)

    def fails() -> None:
        findings.add("before", number=1 / 3)
        raise RuntimeError("the kernel\nfailed")

    def hangs() -> None:
        while True:
            try:
                time.sleep(10)
            except Exception:
                continue

    assert not run_block(Block("first", 10, fails), findings, 10)
    assert not run_block(Block("second", 0.05, hangs), findings, 10)
    assert not run_block(Block("third", 10, hangs), findings, 0.05)
    assert run_block(Block("fourth", 10, lambda: None), findings, 10)
    found = [(line["block"], line["what"]) for line in kept(tmp_path / "findings.jsonl")]
    assert found == [
        ("first", "before"),
        ("first", "failed"),
        ("second", "out of time"),
        ("third", "out of time"),
        ("fourth", "done"),
    ]
    assert kept(tmp_path / "findings.jsonl")[0]["number"] == 0.333333
    assert "the kernel" in told[1]


def test_shares_and_gaps_of_a_trace() -> None:
    events = [
        {"name": "product", "ts": 0.0, "dur": 60.0},
        {"name": "norm", "ts": 70.0, "dur": 10.0},
        # On another stream, meanwhile.
        {"name": "product", "ts": 75.0, "dur": 30.0},
        {"name": "norm", "ts": 110.0, "dur": 0.0},
    ]
    found = summary(events)
    assert found["kernels_per_step"] == 4 / STEPS
    assert found["busy_ms"] == pytest.approx(0.1 / STEPS)
    assert found["gap_ms"] == pytest.approx((10 + 5) / 1000 / STEPS)
    assert found["largest"] == [
        {"name": "product", "share": 0.9, "calls": 2 / STEPS},
        {"name": "norm", "share": 0.1, "calls": 2 / STEPS},
    ]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(SHAPES["tiny"](), torch.device("cpu"), torch.float32)


def argmaxes(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of transformers' own attention."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(input_ids=tokens[None]).logits[0].argmax(-1)


@pytest.mark.parametrize("agreement", [0.5, 0.7, 0.9])
def test_target_and_draft_agree_as_often_as_asked(pair: Pair, agreement: float) -> None:
    vocabulary = SHAPES["tiny"]().target.vocab_size
    tokens = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(1))
    own = argmaxes(pair.target, tokens)
    assert torch.equal(own, pair.successor[tokens])
    assert pair.expected(int(tokens[3]), 2) == [int(own[3]), int(pair.successor[own[3]])]
    pair.set_agreement(agreement)
    agreed = argmaxes(pair.draft, tokens) == own
    assert abs(float(agreed.float().mean()) - agreement) < 0.08
    pair.set_agreement(1.0)
    assert torch.equal(argmaxes(pair.draft, tokens), own)
