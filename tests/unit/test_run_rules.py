"""Which skips a run in CI accepts, and which tests a sample leaves to `make test-all`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests import conftest


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
