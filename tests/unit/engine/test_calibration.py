"""The order in which exact mode tries classes of row counts, and what a stored calibration depends on."""

from __future__ import annotations

from pathlib import Path

from engine.exactness.calibration import cheapest_first
from engine.exactness.calibration_cache import read_calibration

SMALL = (1, 2, 4, 8, 16, 24, 40)
MIDDLE = (8, 16, 32, 48)
LARGE = (96, 112, 128, 144, 160, 176, 192, 208)


def test_classes_that_compute_fewer_rows_for_small_passes_come_first() -> None:
    assert cheapest_first([LARGE, SMALL, MIDDLE]) == [SMALL, MIDDLE, LARGE]
    # A class that ends early takes several passes.
    assert cheapest_first([(1, 8, 16), (1, 8, 40)]) == [(1, 8, 40), (1, 8, 16)]


def test_a_broken_calibration_file_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text('{"shapes": {}}')
    assert read_calibration(tmp_path / "calibration.json") is None
