"""Two cells on real Ray, each with a scheduler, a draft and two targets, behind one gateway."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.streams import Case
from tests.support.changed_workers import slow_steps
from tests.support.command_line import spool
from tests.support.ray_cluster import RayCluster
from tests.support.serving import ENGINE, PlainDecoder, served_on, stream_all
from tests.support.waiting import LONG, wait_until

MODEL = "tiny"
pytestmark = [pytest.mark.long, pytest.mark.ray]

SYSTEM_TOKENS = 192
"""Of each of the system prompts, a token for each character: three pages of what gateways choose by."""
SYSTEMS = 8
STREAMS = 32
TOKENS = 100
PACED: dict[str, Any] = {"threads": 1, "environment": slow_steps(0.05), "drain_seconds": 5}
"""Streams are still open when the cell is killed."""


@dataclass(frozen=True)
class Served:
    cluster: RayCluster
    plain: PlainDecoder
    url: str
    environment: dict[str, str]

    def workers(self, cell: int) -> list[dict[str, Any]]:
        """In use, as the scheduler of the cell knows them; none while there is no scheduler."""
        status = self.cluster.cells()[cell]
        return [one for one in status["workers"] if one["state"] == "WORKER_STATE_IN_USE"] if status else []

    def prefix_hits(self) -> int:
        """Positions that targets of any cell took over from other sequences."""
        figures = [figures for status in self.cluster.cells() for figures in status["prefix_cache"]]
        return sum(one["hits"] for one in figures if one["role"] == "ROLE_TARGET")

    def processes(self, cell: str) -> set[int]:
        """Of the scheduler and the workers of a cell, by the end of its deployments' names."""
        names = [f"spool#{kind}{cell}#" for kind in ("Scheduler", "TargetWorker", "DraftWorker")]
        alive = [one for one in self.cluster.actors() if one["state"] == "ALIVE"]
        return {one["process_id"] for one in alive if any(name in one["name"] for name in names)}


@pytest.fixture(scope="module")
def served(
    ray_cluster: RayCluster, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    target, draft = tiny_pair
    configuration = {
        "models": {
            "target": str(target),
            "draft": str(draft),
            "draft_in": "workers",
            "served_model_name": MODEL,
            "dtype": "float32",
        },
        "engine": ENGINE,
        "scheduling": {"batch_size": 4, "max_running": STREAMS, "policy": "ragged"},
        "groups": {"cells": 2, "draft": {**PACED, "replicas": 1}, "target": {**PACED, "replicas": 2}},
        "gateway": {"drain_seconds": 2},
    }
    with (
        ray_cluster.further_nodes([{}, {}]) as cluster,
        served_on(cluster, configuration, tmp_path_factory.mktemp("cells")) as application,
    ):
        yield Served(cluster, PlainDecoder(target), application.url, dict(application.environment))


def asked_of(system: int, number: int, max_tokens: int) -> Case:
    letters = "".join(random.Random(system).choices(string.ascii_lowercase, k=SYSTEM_TOKENS))
    return Case(f"{letters}{number})", number, 0.8 * (number % 2), max_tokens)


def test_a_cell_killed_amid_streams(served: Served) -> None:
    """Before that, prompts go where their beginnings are, and both cells have about the same to do."""
    first = [asked_of(system, system, 4) for system in range(SYSTEMS)]
    asked = [asked_of(number % SYSTEMS, number, TOKENS) for number in range(STREAMS)]
    assert asyncio.run(stream_all(served.url, MODEL, first)) == served.plain(first)
    hits_before, doomed = served.prefix_hits(), served.processes("-2")
    assert len(doomed) == 4
    live: list[int] = []
    hits: list[int] = []

    def kill_the_second_cell() -> None:
        live.extend(status["live_set"]["live"] for status in served.cluster.cells())
        hits.append(served.prefix_hits() - hits_before)
        for process in doomed:
            os.kill(process, signal.SIGKILL)

    texts = asyncio.run(stream_all(served.url, MODEL, asked, kill_the_second_cell))
    assert texts == served.plain(asked)
    assert sum(live) == STREAMS
    assert max(live) <= 1.25 * STREAMS / 2
    assert hits[0] >= 0.8 * STREAMS * SYSTEM_TOKENS

    wait_until(lambda: len(served.workers(1)) == 3, "the cell is back", 4 * LONG)
    assert not served.processes("-2") & doomed
    assert asyncio.run(stream_all(served.url, MODEL, asked)) == served.plain(asked)
    statuses = served.cluster.cells()
    assert [status["throughput"]["failed"] for status in statuses] == [0, 0]
    assert statuses[1]["throughput"]["finished"] >= STREAMS / 4

    shown = spool("status", environment=served.environment)
    assert shown.code == 0, shown.err
    assert "cell 1" in shown.out
    assert "cell 2" in shown.out
