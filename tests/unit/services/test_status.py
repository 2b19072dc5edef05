"""What a scheduler says of its drafting, in a sentence for people."""

from __future__ import annotations

import pytest

from scheduler.statistics import DraftingSnapshot
from services.scheduler.status import drafting_to_wire


@pytest.mark.parametrize(
    ("length", "outcomes", "said"),
    [
        (0, 0, "t does not draft with d: nothing beats, by enough to change, "),
        (3, 0, "t drafts up to 3 tokens with d, which is to give 1.50 times "),
        (3, 8, "t drafts up to 3 tokens with d, which is to give 1.50 times "),
    ],
)
def test_what_a_target_drafts(length: int, outcomes: int, said: str) -> None:
    now = DraftingSnapshot("t", "d", length, 1.5, 100.0, (0.8, 0.7), outcomes, 0.625)
    ahead = "; prepares for up to 8 outcomes, lately for 62% of those that came" if outcomes else ""
    figures = drafting_to_wire(now)
    assert figures.explanation == f"{said}the tokens a second of plain decoding; acceptance by place 0.80, 0.70{ahead}"
    assert (figures.draft_length, figures.gain, list(figures.acceptance)) == (length, 1.5, [0.8, 0.7])
