"""What is shipped by default, on real Ray while a target is killed: dtype and policy `auto`, the CPU kernels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.chaos.application import TARGET, Application, watching
from bench.chaos.faults import Faults
from bench.chaos.streams import ConstantLoad, cases, faults_of, streaming
from engine.cpu.isa import AUTO, chosen_isa
from tests.support.command_line import save_tokenizer
from tests.support.ray_cluster import RayCluster
from tests.support.serving import PlainDecoder, oracle, served_on
from tests.support.tiny_models import save_tiny_pair

pytestmark = [pytest.mark.slow, pytest.mark.ray]

STREAMS = 16
WORKERS = {"draft": 1, "target": 2}
# Not a share of this machine's memory, which other tests use too.
PAGES = {"kv_pages": 512}
SECONDS = 300.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = save_tiny_pair("llama", tmp_path_factory.mktemp("models"))
    for folder in folders:
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
        save_tokenizer(folder)
    return folders


@pytest.fixture(scope="module")
def application(
    ray_cluster: RayCluster, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Application]:
    target, draft = pair
    configuration = {
        "models": {"target": str(target), "draft": str(draft), "served_name": "tiny"},
        "engine": PAGES,
        "groups": {"draft": {"replicas": 1, "threads": 1}, "target": {"replicas": 2, "threads": 1}},
        "gateway": {"http_on": "head_node"},
    }
    folder = tmp_path_factory.mktemp("configuration")
    with (
        ray_cluster.further_nodes([{}, {}]) as cluster,
        served_on(cluster, configuration, folder) as application,
    ):
        yield application


def test_workers_compute_with_the_kernels(application: Application) -> None:
    for process in application.replicas(TARGET):
        library = f"/cpu-kernels/{chosen_isa(AUTO).name}-bfloat16-"
        assert library in Path(f"/proc/{process.pid}/maps").read_text()


def test_a_killed_target_changes_no_text(application: Application, pair: tuple[Path, Path]) -> None:
    asked = cases(8, max_tokens=200)
    expected = oracle(PlainDecoder(pair[0], "bfloat16", PAGES), asked)

    async def run() -> None:
        async with streaming(application) as client, watching(application) as watcher:
            async with ConstantLoad(client, asked, STREAMS) as load:
                await Faults(application, watcher, load, WORKERS, SECONDS).kill_worker(TARGET)
            assert faults_of(load.records, expected) == []
            assert sum(record.answered for record in load.records) == len(load.records) >= STREAMS
            await watcher.until(lambda report: report.idle, "no sequence and no page", SECONDS)

    asyncio.run(run())
