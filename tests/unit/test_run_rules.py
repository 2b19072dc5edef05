"""Which skips a run in CI accepts, and which tests a sample leaves to `make test-all`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import conftest

ROOT = Path(__file__).parents[2]


@dataclass
class Report:
    longrepr: Any
    outcome: str = "skipped"
    nodeid: str = "tests/unit/test_one.py"


@dataclass
class Item:
    nodeid: str
    markers: dict[str, pytest.Mark] = field(default_factory=dict)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.markers.get(name)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.markers[marker.name] = marker.mark


@pytest.mark.parametrize("reason", ["no GPU here", "another processor: it has no bfloat16"])
def test_want_of_hardware_is_no_failure(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    assert conftest.judged(Report(("test_one.py", 7, f"Skipped: {reason}"))).outcome == "skipped"


@pytest.mark.parametrize("reason", ["there is no kubectl here", "a GPU is there"])
def test_any_other_skip_is_a_failure_in_ci_only(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    report = conftest.judged(Report(("test_one.py", 7, f"Skipped: {reason}")))
    assert report.outcome == "failed"
    assert reason in report.longrepr
    monkeypatch.delenv("CI")
    assert conftest.judged(Report(("test_one.py", 7, f"Skipped: {reason}"))).outcome == "skipped"


def test_what_was_not_skipped_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    assert conftest.judged(Report(None, outcome="passed")).outcome == "passed"


def test_a_sample_is_one_in_so_many_of_each_test_and_ray_comes_first() -> None:
    sampled, ray = pytest.mark.sampled(3).mark, pytest.mark.ray.mark
    items = [Item(f"test_{name}[{number}]", {"sampled": sampled}) for name in "ab" for number in range(4)]
    items += [Item("test_c"), Item("test_d", {"ray": ray})]
    conftest.pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    fast = [item.nodeid for item in items if item.get_closest_marker("slow") is None]
    assert fast == ["test_d", "test_a[0]", "test_a[3]", "test_b[0]", "test_b[3]", "test_c"]


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (pytest.mark.sampled(3, 2), ["", "s", "sl", "", "s", "sl", "", "s", "sl"]),
        (pytest.mark.sampled(3, 1), ["", "s", "s", "", "s", "s", "", "s", "s"]),
        (pytest.mark.sampled(3), ["", "s", "sl", "", "sl", "sl", "", "s", "sl"]),
    ],
)
def test_a_second_sample_leaves_most_of_the_rest_to_who_asks_for_it(
    sample: pytest.MarkDecorator, expected: list[str]
) -> None:
    items = [Item(f"test_a[{number}]", {"sampled": sample.mark}) for number in range(9)]
    conftest.pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    kinds = ["".join(name[0] for name in ("slow", "long") if item.get_closest_marker(name)) for item in items]
    assert kinds == expected


def test_make_looks_for_the_tests_on_ray_where_they_are() -> None:
    """`make test-slow-ray` reads no other folders than these, and `make test-slow` leaves out what is on Ray."""
    found = re.search(r"^RAY_TESTS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    folders = [ROOT / folder for folder in found[1].split()]
    # Not this file, which only speaks of the marker.
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if file != Path(__file__)]
    on_ray = {file for file in files if "pytest.mark.ray" in file.read_text(encoding="utf-8")}
    assert len(on_ray) > 4
    assert {file for file in on_ray if not any(file.is_relative_to(folder) for folder in folders)} == set()
