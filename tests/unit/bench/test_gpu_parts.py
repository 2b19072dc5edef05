"""Settings, result file and page of the GPU benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import page
from bench.gpu.device import check_device
from bench.gpu.measure_command import main, shown
from bench.gpu.results import ResultFile
from bench.gpu.settings import GpuBenchSettings, Point, grid, variant_name
from bench.offline.grid import System
from bench.report import main as report
from scheduler.config import Policy

MACHINE = {"processor": "A Processor", "cores": 2, "memory_gib": 8.0, "python": "3.12", "torch": "2"}
ORIGIN = {"command": "python -m bench.gpu pair", "date": "2026-01-01", "machine": MACHINE}


def settings(**changes: Any) -> GpuBenchSettings:
    return GpuBenchSettings(**{"shape": "tiny", "agreement": 0.7, "batch_sizes": (8, 1), "device": "cpu"} | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_sizes": ()}, r"batch_sizes is \[\], must hold at least one"),
        ({"batch_sizes": (2, 2)}, "and none twice"),
        ({"batch_sizes": (0,)}, "batch_sizes holds 0, must be between 1 and 4096"),
        ({"draft_length": 0}, "draft_length is 0, must be between 1 and 64"),
        ({"max_tokens": 4}, "max_tokens is 4, must be between 8"),
        ({"logits_tokens": 65}, "logits_tokens is 65, must be between 1 and 64"),
        ({"compared": 0}, "compared is 0, must be between 1 and 4096"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(**changes)


@pytest.mark.parametrize(
    ("device", "words"),
    [("tpu", "must be cpu, cuda or cuda:N"), ("meta", "must be cpu, cuda or cuda:N"), ("cuda:999", "torch can use")],
)
def test_devices_that_are_not_there_are_refused(device: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_device(device)


def test_the_grid_begins_with_what_the_others_are_compared_with() -> None:
    points = list(grid(settings()))
    assert points[0] == Point(System.PLAIN, 1)
    assert {(point.system, point.batch_size) for point in points} == {
        (system, batch) for system in (System.PLAIN, System.AUTO, System.RAGGED) for batch in (1, 8)
    }


def test_points_are_scheduled_as_they_say() -> None:
    plain, auto, ragged = (point.scheduling(settings()) for point in grid(settings(batch_sizes=(8,))))
    assert (plain.draft_length, auto.draft_length, ragged.draft_length) == (0, 4, 4)
    assert (auto.policy, ragged.policy) == (Policy.AUTO, Policy.RAGGED)
    assert {config.batch_size for config in (plain, auto, ragged)} == {8}


def test_engines_have_room_for_the_largest_window() -> None:
    few = settings(batch_sizes=(4,), logits_batch_size=4, prompt_tokens=20, max_tokens=40, logits_tokens=8)
    engine = few.engine("model", exact=False)
    window = Point(System.RAGGED, 4).scheduling(few).max_running
    assert engine.kv_pages is not None
    assert engine.kv_pages * engine.page_size >= window * (20 + 40 + 4)
    assert engine.max_num_batched_tokens >= 4 * 5
    assert not engine.exact


def test_graphs_are_varied_where_there_are_some() -> None:
    names = [variant_name(variant) for variant in settings(device="cuda").target_variants]
    assert names == [
        "exact, CUDA graphs",
        "exact, not CUDA graphs",
        "not exact, CUDA graphs",
        "not exact, not CUDA graphs",
    ]
    assert [variant_name(variant) for variant in settings(device="cpu").target_variants] == ["exact", "not exact"]


def test_a_result_is_on_disk_after_every_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    results = ResultFile(path, ORIGIN, {"shape": "tiny"})

    def found() -> dict[str, Any]:
        return json.loads(path.read_text(encoding="utf-8"))

    assert found()["complete"] is False
    assert found()["command"] == ORIGIN["command"]
    results.append("cells", {"tokens": 1})
    assert found()["cells"] == [{"tokens": 1}]
    assert results.whole
    results.leave_out("exact", "no shapes agree")
    assert not results.whole
    assert found()["left_out"] == {"exact": "no shapes agree"}
    assert found()["cells"] == [{"tokens": 1}]
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"]
    with pytest.raises(ValueError, match="is there already"):
        ResultFile(path, ORIGIN, {})
    with pytest.raises(ValueError, match="cannot write"):
        ResultFile(tmp_path / "nowhere" / "found.json", ORIGIN, {})


def test_bad_arguments_end_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.json"
    asked = [str(tmp_path / "pair"), "--shape", "tiny", "--batch-size", "0", "--device", "cpu", "-o", str(output)]
    assert main(asked) == 1
    assert capsys.readouterr().err == "bench.gpu: batch_sizes holds 0, must be between 1 and 4096\n"
    assert not output.exists()


def test_results_do_not_say_where_files_lay() -> None:
    command = shown(["/somewhere/private/pair", "--shape", "tiny", "-o", "/somewhere/out.json"])
    assert command == "python -m bench.gpu measure pair --shape tiny -o out.json"


def cell(system: str, speed: float, exact: bool = True, **changes: Any) -> dict[str, Any]:
    return {
        "engine": {"exact": exact},
        "system": system,
        "batch_size": 8,
        "window": 32,
        "draft_length": 0 if system == "plain" else 4,
        "tokens_per_second": speed,
        "target_step_seconds": 0.016,
        "streaming_share": 0.25,
        "rows_per_step": 7.5,
        "committed_per_round": 2.5,
        "drafted": 0 if system == "plain" else 40,
        "target_share": 0.5,
        "draft_share": 0.25,
        "compared_outputs": 8,
        "equal_outputs": 7,
    } | changes


def content(**changes: Any) -> dict[str, Any]:
    asked = {"shape": "qwen3-8b", "dtype": "bfloat16", "device": "cuda"}
    return {
        "kind": "gpu",
        **ORIGIN,
        "machine": MACHINE | {"gpus": ["A GPU, 1000 MiB"]},
        "settings": asked | {"prompt_tokens": 32, "max_tokens": 128, "draft_length": 4},
        "complete": True,
        "left_out": {},
        "pair": {"found": {"agreement": 0.7125}},
        "streaming_limit": {"weight_bytes": 16e9, "bytes_per_second": 4e12, "step_seconds": 0.004},
        "cells": [cell("plain", 200.0), cell("ragged", 500.0), cell("ragged", 450.0, exact=False)],
        "logits": [
            {
                "engine": {"exact": True},
                "batch_size": 32,
                "compared_logits": 256,
                "equal_logits": 255,
                "sequences": 8,
                "equal_sequences": 7,
            }
        ],
    } | changes


def written(folder: Path, found: dict[str, Any] | None) -> str:
    results, docs = folder / "results", folder / "docs"
    results.mkdir()
    docs.mkdir()
    if found is not None:
        (results / "h200.json").write_text(json.dumps(found), encoding="utf-8")
    assert report(["--results", str(results), "--docs", str(docs)]) == 0
    return (docs / "performance.md").read_text(encoding="utf-8")


def test_the_page_shows_a_result(tmp_path: Path) -> None:
    text = written(tmp_path, content())
    table = [[one.strip() for one in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert table[0] == list(page.HEADINGS)
    assert table[2:] == [
        ["plain", "8", "32", "exact", "200.0", "1.00", "16.00", "25%", "", "7.5", "50%", "25%", "7 of 8"],
        ["ragged, 4", "8", "32", "exact", "500.0", "2.50", "16.00", "25%", "2.50", "7.5", "50%", "25%", "7 of 8"],
        # No plain decoding stands beside this one.
        ["ragged, 4", "8", "32", "not exact", "450.0", "", "16.00", "25%", "2.50", "7.5", "50%", "25%", "7 of 8"],
    ]
    assert "A GPU, 1000 MiB" in text
    assert "16.00 GB at 4000 GB/s" in text
    assert "speculation at batch 32: 255 of 256 bit-equal, 7 of 8 texts equal" in text
    assert "Anything on a GPU" not in text
    assert "ended before" not in text


def test_the_page_says_what_a_result_lacks(tmp_path: Path) -> None:
    text = written(tmp_path, content(complete=False, left_out={"exact": "no shapes agree"}))
    assert "Left out: exact (no shapes agree)." in text


def test_a_run_that_was_killed_early_is_no_figure_of_a_gpu(tmp_path: Path) -> None:
    bare = content(complete=False, cells=[], logits=[])
    del bare["pair"], bare["streaming_limit"]
    text = written(tmp_path, bare)
    assert "The run was ended before all was measured." in text
    assert "Anything on a GPU" in text


@pytest.mark.parametrize("found", [None, content(machine=MACHINE)])
def test_the_page_says_that_gpu_figures_are_missing(tmp_path: Path, found: dict[str, Any] | None) -> None:
    text = written(tmp_path, found)
    not_measured = text[text.index("## Not measured") :]
    assert "Anything on a GPU" in not_measured
    assert "no figure on this page was taken on one" in not_measured
