"""Two versions' measurements, side by side."""

from __future__ import annotations

from typing import Any

import pytest

from bench.offline.versions import compare, merged


def file(**speeds: list[float]) -> dict[str, Any]:
    """Of cells `auto`, by the draft's name at batch 4; every repeat drafts ten times as many tokens as it is fast."""
    measurements = [
        {
            "point": {"system": "auto", "batch_size": 4, "draft": draft},
            "tokens_per_second": speed,
            "statistics": {"drafted": 10 * speed},
        }
        for draft, repeats in speeds.items()
        for speed in repeats
    ]
    return {"settings": {"target": "demo", "cpu_isa": "avx2"}, "measurements": measurements}


def test_cells_that_both_have_are_compared_repeat_by_repeat() -> None:
    (cell,) = compare(file(demo=[10, 20, 40], lost=[1]), file(demo=[20, 20, 20], fresh=[1]))
    assert cell["ratio_of_medians"] == 1.0
    assert cell["mean_ratio"] == pytest.approx(1.0)
    assert (cell["old"], cell["new"]) == ([10, 20, 40], [20, 20, 20])
    assert (cell["old_drafted"], cell["new_drafted"]) == ([100, 200, 400], [200, 200, 200])
    assert (cell["target"], cell["draft"], cell["batch_size"], cell["cpu_isa"]) == ("demo", "demo", 4, "avx2")


def test_versions_that_were_not_measured_equally_often_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="shorter"):
        list(compare(file(demo=[10, 20]), file(demo=[20])))


def test_cells_measured_again_replace_those_kept() -> None:
    first, again = (list(compare(file(**speeds), file(**speeds))) for speeds in ({"a": [1], "b": [2]}, {"b": [3]}))
    assert [(cell["draft"], cell["new"]) for cell in merged(first, again)] == [("a", [1]), ("b", [3])]
