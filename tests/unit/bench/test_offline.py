"""The parts of `spool bench offline` that need no worker: grid, settings, summaries, comparison of versions."""

from __future__ import annotations

from typing import Any

import pytest

from bench.offline.grid import GridPoint, System, grid_points
from bench.offline.options import BenchOfflineSettings
from bench.offline.results import Measurement, summarise
from bench.offline.versions import compare

PLAIN = GridPoint(System.PLAIN, 8)
AUTO = GridPoint(System.AUTO, 8, "demo", 4)


def test_every_combination_is_measured_once_and_references_first() -> None:
    systems = [System.AUTO, System.PLAIN, System.VLLM, System.VLLM_DRAFT, System.VLLM_NGRAM]
    points = grid_points(systems, [8, 1], ["demo", "ngram"], [2, 4])
    assert points[:2] == [GridPoint(System.PLAIN, 1), GridPoint(System.VLLM, 1)]
    assert len(set(points)) == len(points) == 2 * (2 + 4 + 2 + 2)
    assert all((point.draft is None) is (point.draft_length == 0) for point in points)
    assert {point.draft for point in points if point.system is System.VLLM_DRAFT} == {"demo"}
    assert {point.draft for point in points if point.system is System.VLLM_NGRAM} == {"ngram"}
    assert {point.reference.system for point in points} == {System.PLAIN, System.VLLM}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": ["vllm"]}, "policy is vllm, must be one of plain, eqspec, exspec, ragged, auto"),
        ({"peer": ["auto"]}, "peer is auto, must be one of transformers, vllm"),
        ({"draft_length": [0]}, "draft_length is 0, must be between 1 and 64"),
        ({"batch_size": [0]}, "batch_size is 0"),
        ({"peer": ["vllm"], "sampling": {"temperature": 1.0}}, r"temperature is 1\.0, must be 0 with --peer"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchOfflineSettings.model_validate(settings)


def test_speed_is_compared_with_plain_decoding_of_the_same_repeat() -> None:
    def measured(point: GridPoint, repeat: int, seconds: float, exact_match: float = 1.0) -> Measurement:
        return Measurement(point, repeat, 100, seconds, exact_match, [])

    # The machine is half as fast in the second repeat.
    plain, auto = summarise(
        [measured(PLAIN, 0, 10), measured(AUTO, 0, 5), measured(AUTO, 1, 10, exact_match=0.5), measured(PLAIN, 1, 20)]
    )
    assert plain["ratio_to_plain"] == {"median": 1, "minimum": 1, "maximum": 1}
    assert auto["ratio_to_plain"] == {"median": 2, "minimum": 2, "maximum": 2}
    assert auto["tokens_per_second"] == {"median": 15, "minimum": 10, "maximum": 20}
    assert auto["exact_match"] == 0.5
    (alone,) = summarise([measured(AUTO, 0, 5)])
    assert alone["ratio_to_plain"] is None


def test_versions_are_compared_pair_by_pair() -> None:
    old = [{"plain": 10.0, "auto": 5.0}, {"plain": 20.0, "auto": 5.0}]
    new = [{"plain": 20.0}, {"plain": 40.0}]
    assert compare(old, new) == [{"cell": "plain", "old": [10, 20], "new": [20, 40], "ratio": pytest.approx(2)}]
