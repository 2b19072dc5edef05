"""What a scheduler says of its drafting, in a sentence for people."""

from __future__ import annotations

import pytest

from scheduler.statistics import DraftingSnapshot
from services.scheduler.status import drafting_to_wire


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (0, "t does not draft with d: nothing beats, by enough to change, "),
        (3, "t drafts up to 3 tokens with d, which is to give 1.50 times "),
    ],
)
def test_what_a_target_drafts(length: int, said: str) -> None:
    now = DraftingSnapshot("t", "d", length, 1.5, 100.0, (0.8, 0.7))
    figures = drafting_to_wire(now)
    assert figures.explanation == f"{said}the tokens a second of plain decoding; acceptance by place 0.80, 0.70"
    assert (figures.draft_length, figures.gain, list(figures.acceptance)) == (length, 1.5, [0.8, 0.7])
