"""The report: every figure with its command and machine, and in words what was not measured."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.memory import MemorySamples, summarise
from bench.offline.grid import GridPoint, System
from bench.offline.results_file import BenchFile
from bench.offline.summary import Measurement
from bench.report import main, markdown_table
from bench.reporting.plots import MAX_BYTES
from bench.serving.load import Ending, LatencyBound, RequestRecord, summarise_load
from services.scheduler.telemetry.statistics import StatisticsSnapshot

MACHINE = {"processor": "A Processor", "cores": 2, "memory_gib": 8.0, "python": "3.11", "torch": "2"}
SETTINGS = {
    "prompts": 16,
    "prompt_tokens": 321,
    "sampling": {"max_tokens": 64, "temperature": 0.0},
    "dtype": "bfloat16",
    "plain_threads": 2,
    "threads": None,
    "window": None,
    "window_batches": None,
}


def measured(point: GridPoint, speed: float) -> Measurement:
    drafting = point.system.drafts
    statistics = StatisticsSnapshot(
        tokens=int(speed * 10),
        drafted=40 if drafting else 0,
        accepted_lengths={0: 3, 2: 5} if drafting else {},
        committed_per_round=2.25,
        mean_group_size=3.5,
        target_busy_share=0.5,
        waiting_share=0.25,
        realignment_share=0.125,
        scheduling_share=0.125,
    )
    category = {
        "committed_per_round": 2.25,
        "drafted_at": [8, 8] if drafting else [],
        "accepted_at": [6, 4] if drafting else [],
        "sequence_tokens_per_second": 9.75,
    }
    return Measurement(
        point=point,
        repeat=0,
        tokens=int(speed * 10),
        seconds=10.0,
        exact_match=1.0,
        different=[],
        source="code",
        statistics=statistics.to_json() if point.system.is_spool else {},
        hidden_draft_share=0.625 if drafting else None,
        categories={"qa": category, "math": category} if point.system.is_spool else {},
    )


def write_offline(folder: Path, **settings: object) -> None:
    file = BenchFile(folder / "laptop.json", SETTINGS | settings, MACHINE, "spool bench offline --prompts spec.jsonl")
    for batch_size, plain, auto in ((1, 20.0, 50.0), (8, 80.0, 100.0)):
        file.add(measured(GridPoint(System.PLAIN, batch_size), plain))
        file.add(measured(GridPoint(System.AUTO, batch_size, "demo", 4), auto))
    file.add(measured(GridPoint(System.TRANSFORMERS, 8, exact=None), 40.0))
    file.leave_out("vllm", "no --vllm-python was given")


def write_serve(folder: Path) -> None:
    bound = LatencyBound(2.0, 0.2)
    loads = []
    for rate in (2.0, 1.0):
        record = RequestRecord(0.0, 1.5, 4.0, Ending.ANSWERED, "", 11, [2.0, 4.0])
        loads.append({"rate": rate} | summarise_load([record, RequestRecord(1.0, 1.0, 1.1, Ending.REFUSED)], bound))
    settings = {
        "seconds": 60,
        "max_tokens": 32,
        "speculation": True,
        "first_token_bound": 2.0,
        "token_bound": 0.2,
    }
    content = {"kind": "serve", "commands": ["spool bench serve --rate 1"], "date": "2026-01-01", "machine": MACHINE}
    (folder / "load.json").write_text(json.dumps(content | {"settings": settings, "loads": loads}))


def write_draft(folder: Path) -> None:
    found = {"answers": 2, "positions": 90, "agreement": 0.25, "draft_tokens_per_round": 1.3125}
    found |= {"lookup_tokens_per_round": 1.5, "combined_tokens_per_round": 1.875}
    result = {"draft": "demo", "draft_length": 4, "lookup_match": 2, "categories": {"rag": found, "all": found}}
    content: dict[str, Any] = {"command": "python -m bench.distill evaluate", "date": "2026-01-01", "machine": MACHINE}
    (folder / "draft_demo.json").write_text(json.dumps(content | {"result": result}))


def write_memory(folder: Path) -> None:
    samples = MemorySamples(
        pss={"target-0": [500 << 20] * 15 + [512 << 20] * 5, "scheduler": [32 << 20]},
        used_pages={"target-0": [0.5, 1.0]},
        sequences={"target-0": [4, 6]},
    )
    described = SimpleNamespace(kv_bytes_per_token=1024, total_pages=64, page_size=16)
    result = {"sequences": 48, "preemptions": 3, "processes": summarise(samples, {"target-0": described})}
    content: dict[str, Any] = {"command": "python -m bench.memory", "date": "2026-01-01", "machine": MACHINE}
    (folder / "memory.json").write_text(json.dumps(content | {"result": result}))


def write_plan_error(folder: Path) -> None:
    """Of the demo pair, at two rates."""
    times = {"p50": 0.1, "p99": 0.2}
    figures = {"requests": 60, "tokens_per_second": 50.0, "first_token": times, "token": times}
    error = {"tokens/s": 0.01} | {f"{name} {part}": -0.05 for name in ("first token", "token") for part in times}
    loads = [
        {"rate": rate, "measured": figures | {"target_busy": rate}, "predicted": figures | {"target_busy": 0.4}}
        | {"error": error}
        for rate in (0.25, 0.5)
    ]
    costs = {"step_seconds": 0.012, "token_seconds": 0.004, "block_tokens": 6}
    plan = {"acceptance": 0.6, "target": {"measured": [costs]}, "draft": {"measured": [costs | {"block_tokens": 1}]}}
    profile = {role: {"law": {"error": 0.02}} for role in ("target", "draft")}
    result = {"workers": "demo", "plan": plan, "profile": profile, "longest_prompt": 96, "output_tokens": 16.0}
    content: dict[str, Any] = {"command": "python -m bench.plan_error", "date": "2026-01-01", "machine": MACHINE}
    (folder / "plan_error_demo.json").write_text(json.dumps(content | {"result": result | {"loads": loads}}))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir()
    docs.mkdir()
    return results, docs


def report(folders: tuple[Path, Path]) -> str:
    results, docs = folders
    assert main(["--results", str(results), "--docs", str(docs)]) == 0
    return (docs / "performance.md").read_text(encoding="utf-8")


def rows(page: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]


def test_nothing_measured_is_said_in_words(folders: tuple[Path, Path]) -> None:
    page = report(folders)
    not_measured = page[page.index("## Not measured") :]
    for words in ("speed of decoding", "Latency under load", "Memory", "Anything on a GPU"):
        assert words in not_measured
    assert rows(page) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "Up to 48 sequences, or four batches where that is more, were in work"),
        ({"window": 8}, "Up to 8 sequences were in work"),
        ({"window_batches": 1}, "Up to one batch of sequences were in work"),
        ({"window_batches": 3}, "Up to 3 batches of sequences were in work"),
    ],
)
def test_how_many_sequences_were_in_work_is_said(folders: tuple[Path, Path], given: dict[str, int], words: str) -> None:
    write_offline(folders[0], **given)
    assert words in report(folders)


def test_every_cell_is_shown_with_command_and_machine(folders: tuple[Path, Path]) -> None:
    write_offline(folders[0])
    page = report(folders)
    assert "    spool bench offline --prompts spec.jsonl" in page
    assert "A Processor, 2 cores, 8.0 GiB" in page
    assert "Left out: vllm (no --vllm-python was given)." in page
    table = rows(page)
    auto = next(row for row in table if row[:2] == ["auto", "8"] and len(row) == 14)
    assert auto == [
        *("auto", "8", "demo, 4", "yes", "100.0 (100.0-100.0)", "1.25 (1.25-1.25)", "100.0%", "2.25", "3.5"),
        *("50%", "25%", "12%", "12%", "62%"),
    ]
    peer = next(row for row in table if row[0] == "transformers")
    assert peer[4:7] == ["40.0 (40.0-40.0)", "0.50 (0.50-0.50)", "100.0%"]
    by_category = [row for row in table if row[3:4] == ["math"]]
    assert by_category == [["auto", "1", "demo, 4", "math", "2.25", "0.75 0.50", "9.8"]]
    not_measured = page[page.index("## Not measured") :]
    assert "eqspec, exspec, ragged, assisted, vllm, vllm-draft, vllm-ngram" in not_measured
    assert "exact off" in not_measured


def test_figures_are_small_valid_and_the_same_every_time(folders: tuple[Path, Path]) -> None:
    write_offline(folders[0])
    write_serve(folders[0])
    page = report(folders)
    figures = sorted((folders[1] / "figures").iterdir())
    assert [path.name for path in figures] == [
        "laptop_accepted.svg",
        "laptop_throughput.svg",
        "laptop_time.svg",
        "load_latency.svg",
    ]
    before = {path: path.read_bytes() for path in figures}
    for path, content in before.items():
        assert len(content) <= MAX_BYTES
        assert ElementTree.fromstring(content).tag.endswith("svg")
        assert f"(figures/{path.name})" in page
    assert report(folders) == page
    assert {path: path.read_bytes() for path in figures} == before


def test_loads_and_memory_have_tables(folders: tuple[Path, Path]) -> None:
    write_serve(folders[0])
    write_memory(folders[0])
    page = report(folders)
    table = rows(page)
    assert ["1", "1 of 2", "1", "0", "2.8", "0.25", "2.00 / 2.00 / 2.00", "200 / 200 / 200"] in table
    assert "the client was late by 1.5 s" in page
    tenths = " ".join(["500"] * 7 + ["506"] + ["512"] * 2)
    assert ["target-0", "512", tenths, "1024", "1.0", "75%", "100%", "5.0", "4%"] in table
    assert ["scheduler", "32", "32", "", "", "", "", "", ""] in table
    not_measured = page[page.index("## Not measured") :]
    assert "Latency" not in not_measured
    assert "Memory" not in not_measured


def test_drafts_are_compared_by_category(folders: tuple[Path, Path]) -> None:
    write_draft(folders[0])
    page = report(folders)
    for category in ("rag", "all"):
        assert [category, "2", "90", "0.250", "1.312", "1.500", "1.875"] in rows(page)
    assert "draft_demo.json" not in page[page.index("## Drafts") :].partition("## Other results")[2]


def test_a_result_without_its_command_is_refused(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (folders[0] / "rumour.json").write_text(json.dumps({"machine": MACHINE, "date": "2026-01-01", "result": 5}))
    assert main(["--results", str(folders[0]), "--docs", str(folders[1])]) == 1
    assert "rumour.json says neither command nor machine, or not both" in capsys.readouterr().err
    assert not (folders[1] / "performance.md").exists()


def test_tables_put_figures_right_and_text_left() -> None:
    table = markdown_table(("name", "value"), [["a|b", "1.5"], ["c", ""]])
    assert table.splitlines() == ["| name | value |", "| --- | ---: |", "| a\\|b | 1.5 |", "| c |  |"]


def test_the_plan_error_of_the_demo_pair(folders: tuple[Path, Path]) -> None:
    write_plan_error(folders[0])
    page = report(folders)
    assert "### plan_error_demo" in page
    assert "12.0 ms a pass and 4.00 ms a token in blocks of 6 on the target" in page
    assert "busy for 25%, 50% of the time, by the prediction for 40%, 40%" in page
    assert ["0.25", "difference", "+1.0%", "-5.0%", "-5.0%", "-5.0%", "-5.0%"] in rows(page)
    assert (folders[1] / "figures" / "plan_error_demo_latency.svg").is_file()
