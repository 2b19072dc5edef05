"""Fewer replicas of a target on real Ray, in the midst of its streams: they go on elsewhere with their KV."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
import yaml

from engine.model_source import CACHE_VARIABLE
from tests.support.command_line import save_tokenizer, spool
from tests.support.ray_cluster import RayCluster
from tests.support.serving import ENGINE, PlainDecoder, free_ports, requests, stream_all
from tests.support.tiny_models import save_tiny_pair
from tests.support.waiting import LONG, wait_until

MODEL = "tiny"


def rendered(folder: Path, http_port: int, grpc_port: int) -> dict[str, object]:
    """What `spool config --serve` makes of a configuration with two targets and a draft."""
    target, draft = save_tiny_pair("llama", folder)
    for model in (target, draft):
        save_tokenizer(model)
    token = folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    configuration = {
        "models": {"target": str(target), "draft": str(draft), "served_name": MODEL, "dtype": "float32"},
        "engine": ENGINE,
        "scheduling": {"batch_size": 4, "window": 32, "policy": "ragged", "kv_movement": "always"},
        "groups": {
            "draft": {"replicas": 1, "threads": 1, "drain_seconds": 5},
            "target": {"replicas": 2, "threads": 1, "drain_seconds": LONG},
        },
        "gateway": {"http_port": http_port, "grpc_port": grpc_port, "http_on": "head_node", "drain_seconds": 2},
        "internal": {"token_file": str(token)},
    }
    file = folder / "spool.yaml"
    file.write_text(yaml.safe_dump(configuration))
    ended = spool("config", "--serve", "--config", file)
    assert ended.code == 0, ended.err
    config: dict[str, object] = yaml.safe_load(ended.out)
    return config


def with_targets(config: dict[str, object], count: int, file: Path) -> Path:
    (application,) = config["applications"]  # type: ignore[misc]
    for deployment in application["deployments"]:  # type: ignore[index]
        if deployment["name"] == "TargetWorker":
            deployment["num_replicas"] = count
    file.write_text(yaml.safe_dump(config))
    return file


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


def test_streams_of_a_target_that_is_scaled_away_go_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    http_port, grpc_port = free_ports(2)
    config = rendered(tmp_path, http_port, grpc_port)
    asked = requests(12, max_tokens=400)
    url = f"http://127.0.0.1:{http_port}"
    with RayCluster([{}, {}]) as cluster:

        def targets() -> list[str]:
            status = cluster.scheduler() or {"workers": []}
            workers = [one for one in status["workers"] if one["role"] == "ROLE_TARGET"]
            return [one["worker_id"] for one in workers if one["state"] == "WORKER_STATE_IN_USE"]

        cluster.deploy(with_targets(config, 2, tmp_path / "two.yaml"))
        wait_until(lambda: len(targets()) == 2, "two targets", 2 * LONG)
        before = set(targets())
        wait_until(lambda: answers(f"{url}/health"), "a gateway")

        def scale_down() -> None:
            cluster.deploy(with_targets(config, 1, tmp_path / "one.yaml"))

        texts = asyncio.run(stream_all(url, MODEL, asked, scale_down))
        wait_until(lambda: len(targets()) == 1, "one target")
        left = targets()
        status = cluster.scheduler()
    assert texts == PlainDecoder(tmp_path / "llama-target")(asked)
    assert set(left) < before
    assert status["kv_moves"]["moves"] > 0
    assert status["kv_moves"]["failed"] == 0
    assert status["throughput"]["failed"] == 0
