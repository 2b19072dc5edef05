"""The autoscaling policy on real Ray: targets come with the load, hand over their sequences and go with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.chaos.application import Application
from bench.chaos.streams import ConstantLoad, cases, faults_of, streaming
from tests.support.command_line import spool
from tests.support.ports import free_ports
from tests.support.ray_cluster import RayCluster
from tests.support.serving import ENGINE, PACED, PlainDecoder, oracle
from tests.support.waiting import LONG, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray]

MODEL = "tiny"
MANY, FEW = 10, 2
SECONDS = 2 * LONG


def rendered(folder: Path, pair: tuple[Path, Path], http_port: int, grpc_port: int) -> Path:
    """A file for `serve deploy`: one target or two, of which each has pages for about four of the streams.

    What fits does not depend on how fast the machine is.
    """
    target, draft = pair
    token = folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    pace = {"max_replicas": 2, "upscale_delay_seconds": 1, "downscale_delay_seconds": 4}
    worker = {**PACED, "drain_seconds": LONG}
    configuration = {
        "models": {"target": str(target), "draft": str(draft), "served_name": MODEL, "dtype": "float32"},
        "engine": ENGINE,
        "scheduling": {"batch_size": 4, "max_running": 32, "policy": "ragged", "kv_movement": "always"},
        "groups": {
            "draft": {**worker, "autoscaling": pace},
            # No latency that a busy machine misses: pages alone are what targets are short of.
            "target": {**worker, "kv_pages": 128, "autoscaling": {**pace, "token_seconds": 3600}},
        },
        "gateway": {"http_port": http_port, "grpc_port": grpc_port, "http_on": "head_node", "drain_seconds": 2},
        "internal": {"token_file": str(token)},
    }
    file = folder / "spool.yaml"
    file.write_text(yaml.safe_dump(configuration))
    ended = spool("config", "--serve", "--config", file)
    assert ended.code == 0, ended.err
    (folder / "serve.yaml").write_text(ended.out)
    return folder / "serve.yaml"


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


def test_targets_come_and_go_with_the_load(
    ray_cluster: RayCluster, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    http_port, grpc_port = free_ports(2)
    file = rendered(tmp_path, tiny_pair, http_port, grpc_port)
    url = f"http://127.0.0.1:{http_port}"
    application = Application(url, f"127.0.0.1:{grpc_port}", MODEL, 0, {})
    asked = cases(8, max_tokens=380)
    seen: list[dict[str, Any]] = []
    with ray_cluster.further_nodes([{}, {}]) as cluster:

        def targets(count: int) -> bool:
            """Whether so many are in use and no other is there; what the scheduler said of them is kept."""
            status = cluster.scheduler()
            if status is None:
                return False
            seen.append(status)
            states = [one["state"] for one in status["workers"] if one["role"] == "ROLE_TARGET"]
            return states == ["WORKER_STATE_IN_USE"] * count

        cluster.deploy(file)
        wait_until(lambda: targets(1), "a target", SECONDS)
        wait_until(lambda: answers(f"{url}/health"), "a gateway")

        async def load(streams: int, until: Callable[[], bool]) -> list[str]:
            async with streaming(application) as client, ConstantLoad(client, asked, streams) as load:
                await asyncio.to_thread(wait_until, until, f"{streams} streams", SECONDS)
            assert len(load.records) >= streams
            return faults_of(load.records, expected)

        expected = oracle(PlainDecoder(tiny_pair[0]), asked)
        assert asyncio.run(load(MANY, lambda: targets(2))) == []
        before = seen[-1]
        assert asyncio.run(load(FEW, lambda: targets(1))) == []
        after = seen[-1]
    assert before["kv_moves"]["moves"] == 0
    # Whether anything moved depends on whether the target that leaves has a stream just then (test_cluster_changes.py).
    assert after["kv_moves"]["failed"] == 0
    assert after["throughput"]["failed"] == 0
    assert after["throughput"]["refused"] == 0
    decided = [one["autoscaling"]["figures"] for one in seen if one["autoscaling"] is not None]
    assert max(one.get("targets_needed", 0.0) for one in decided) > 1
    assert before["autoscaling"]["explanation"].startswith("2 targets: ")
    assert after["autoscaling"]["figures"]["targets_wanted"] == 1
