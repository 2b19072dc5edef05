"""`spool plan`, from the file to what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from deploy.config.loading import configuration_from
from tests.support.command_line import spool

PLAN = """\
traffic: {requests_per_second: 6, prompt_tokens: 60, output_tokens: 40, requests: 60}
service: {first_token_seconds: 0.5, token_seconds: 0.03}
acceptance: 0.8
target:
  measured: [{name: box, step_seconds: 0.02, token_seconds: 0.0004, price: 2}]
draft:
  measured: [{name: box, step_seconds: 0.002, token_seconds: 0.00002, price: 0.5}]
max_targets: 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "plan.yaml"
    file.write_text(PLAN, encoding="utf-8")
    return file


def test_prints_the_fleets_and_what_to_configure(file: Path) -> None:
    ended = spool("plan", file)
    assert ended.code == 0, ended.err
    for system in ("plain", "drafts apart", "drafts colocated"):
        assert system in ended.out
    assert " on box: first token" in ended.err
    configuration = ended.out.partition("In the configuration:")[2]
    # The advice is a configuration that Spool takes.
    assert configuration_from(yaml.safe_load(configuration)).groups.target.replicas >= 1


def test_prints_one_json_object(file: Path) -> None:
    ended = spool("plan", file, "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["plan"]["traffic"]["prompt_variation"] == 1.0
    apart = found["fleets"]["drafts apart"]
    assert apart["price"] == 2 * apart["targets"] + 0.5 * apart["drafts"]
    assert apart["figures"]["token"]["p99"] <= 0.03
    assert apart["figures"]["first_token"]["p99"] <= 0.5


def test_says_so_where_no_fleet_is_enough(file: Path) -> None:
    file.write_text(PLAN.replace("token_seconds: 0.03", "token_seconds: 0.001"), encoding="utf-8")
    ended = spool("plan", file)
    assert ended.code == 1
    assert "No fleet of up to 4 targets keeps 0.5 s to the first token and 1 ms a token" in " ".join(ended.out.split())


@pytest.mark.parametrize(
    ("before", "after", "complaints"),
    [
        ("acceptance: 0.8", "acceptance: 1.5", ["plan.yaml:3", "acceptance", "1.5"]),
        ("acceptance: 0.8\n", "", ["acceptance"]),
        ("requests_per_second: 6, ", "", ["requests_per_second", "trace", "neither is given"]),
        ("requests: 60", "requests: 3", ["traffic.requests", "3", "at least 50"]),
        (
            "measured: [{name: box, step_seconds: 0.02",
            "gpus: [h1000]\n  measured: [{name: box, step_seconds: 0.02",
            ["h1000"],
        ),
        ("requests_per_second: 6", "trace: nothing.csv", ["nothing.csv", "cannot be read"]),
        ("max_targets: 4", "max_target: 4", ["max_target", "max_targets"]),
    ],
)
def test_what_is_wrong_is_named_with_its_place(file: Path, before: str, after: str, complaints: list[str]) -> None:
    file.write_text(PLAN.replace(before, after), encoding="utf-8")
    ended = spool("plan", file)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("spool: ")
    assert "Traceback" not in ended.err
    for complaint in complaints:
        assert complaint in ended.err
