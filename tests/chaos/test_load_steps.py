"""Both groups of workers follow a load from 1 to 64 clients and back, on several logical nodes of a real Ray.

    SPOOL_RESULTS=bench/results make test TESTS="-m long tests/chaos/test_load_steps.py"

SPOOL_RESULTS is the folder for what was measured. Without SPOOL_RESULTS it goes to a temporary folder, so that the
committed results stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.autoscaling import PACE, parser, run
from bench.pacing import paced
from bench.record import write_result
from tests.support.ray_cluster import RayCluster

COMMAND = 'SPOOL_RESULTS=bench/results make test TESTS="-m long tests/chaos/test_load_steps.py"'
NODES = 6

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture
def on_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Options of the measurement for a Ray of several nodes, none of which has room for a whole group."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    with paced(PACE), RayCluster([{}] * NODES) as cluster:
        for name, value in cluster.environment.items():
            if os.environ.get(name) != value:
                monkeypatch.setenv(name, value)
        yield ["--set", f"ray.address={cluster.address}", "--set", f"internal.token_file={token}"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """The folder for what was measured."""
    return Path(os.environ.get("SPOOL_RESULTS") or tmp_path)


def measured(file: Path, options: list[str]) -> dict[str, Any]:
    result = run(parser().parse_args(options))
    write_result(file, COMMAND, result)
    return result


def replicas(result: dict[str, Any], role: str) -> list[int]:
    return [int(one[role]) for one in result["by_step"]]


def assert_nothing_failed(result: dict[str, Any]) -> None:
    assert result["wrong"] == []
    assert result["refused"] == 0
    assert result["answered"] == result["requests"] > 0


def test_both_groups_follow_the_load(on_nodes: list[str], results: Path) -> None:
    result = measured(results / "autoscaling.json", on_nodes)
    assert_nothing_failed(result)
    targets, drafts = replicas(result, "targets"), replicas(result, "drafts")
    middle = len(targets) // 2
    assert targets[0] == drafts[0] == targets[-1] == drafts[-1] == 1
    assert targets[middle] == max(targets) >= 4
    assert 1 < max(one["draft"] for one in result["samples"]) < targets[middle]
    assert targets[1] < targets[middle] > targets[-2]


def test_poor_acceptance_gets_no_more_drafts(on_nodes: list[str], results: Path) -> None:
    result = measured(results / "autoscaling_poor_drafts.json", [*on_nodes, "--agreement", "0.1"])
    assert_nothing_failed(result)
    assert max(replicas(result, "targets")) >= 4
    assert {one["draft"] for one in result["samples"]} == {1.0}
