"""What becomes of streams while the Ray cluster under them changes: all of them end with the text of plain decoding."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from bench.chaos.application import Application
from bench.chaos.pauses import Window, pauses
from bench.chaos.streams import Case, ConstantLoad, cases, faults_of, streaming
from tests.support.command_line import save_tokenizer, spool
from tests.support.ports import free_ports
from tests.support.ray_cluster import RayCluster
from tests.support.serving import ENGINE, PACED, PlainDecoder, oracle, stream_all
from tests.support.tiny_models import save_tiny_pair
from tests.support.waiting import LONG, setting, wait_until

pytestmark = [pytest.mark.long, pytest.mark.ray]

MODEL = "tiny"
"""Of a target: for ten sequences of 380 tokens."""
MANY, FEW = 20, 2
"""Streams, of which one target has pages for about ten. What fits does not depend on how fast the machine is."""


TWO_RANKS = {**ENGINE, "tensor_parallel_size": 2}


@dataclass
class Cell:
    """The application on a cluster, and what its configuration says."""

    cluster: RayCluster
    url: str
    grpc_port: int
    folder: Path
    configuration: dict[str, Any]
    plain: PlainDecoder

    def deploy(self, **changes: Any) -> None:
        """With these sections changed; answered when Serve has taken notice."""
        self.cluster.deploy(self.rendered(**changes))

    def rendered(self, **changes: Any) -> Path:
        """The file for Serve, made before streams begin that are to run while Serve takes notice of it."""
        file = self.folder / "spool.yaml"
        file.write_text(yaml.safe_dump(self.configuration | changes))
        ended = spool("config", "render", file)
        assert ended.code == 0, ended.err
        serve_file = self.folder / "serve.yaml"
        serve_file.write_text(ended.out)
        return serve_file

    def workers(self, role: str) -> list[dict[str, Any]]:
        status = self.cluster.scheduler() or {"workers": []}
        there = [one for one in status["workers"] if one["role"] == f"ROLE_{role}"]
        return [one for one in there if one["state"] == "WORKER_STATE_IN_USE"]

    def stream(self, asked: list[Case], on_start: Any = None) -> list[str]:
        return asyncio.run(stream_all(self.url, MODEL, asked, on_start))


@pytest.fixture(scope="module")
def cell(
    ray_cluster: RayCluster, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cell]:
    folder = tmp_path_factory.mktemp("cell")
    target, draft = tiny_pair
    token = folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    http_port, grpc_port = free_ports(2)
    configuration = {
        "models": {
            "target": str(target),
            "draft": str(draft),
            "draft_in": "workers",
            "draft_ahead": "always",
            "served_model_name": MODEL,
            "dtype": "float32",
        },
        "engine": ENGINE,
        "scheduling": {"batch_size": 4, "max_running": 32, "policy": "ragged"},
        "groups": {
            "draft": {**PACED, "replicas": 1, "drain_seconds": 5},
            "target": {**PACED, "replicas": 2, "drain_seconds": LONG, "kv_memory": ENGINE["kv_memory"] // 2},
        },
        "gateway": {"port": http_port, "grpc_port": grpc_port, "drain_seconds": LONG},
        "internal": {"token_file": str(token)},
    }
    with ray_cluster.further_nodes([{}, {}]) as cluster:
        cell = Cell(cluster, f"http://127.0.0.1:{http_port}", grpc_port, folder, configuration, PlainDecoder(target))
        cell.deploy()
        wait_until(lambda: len(cell.workers("TARGET")) == 2, "two targets", 2 * LONG)
        wait_until(lambda: len(cell.workers("DRAFT")) == 1, "a draft", 2 * LONG)
        wait_until(lambda: answers(f"{cell.url}/health"), "a gateway")
        yield cell


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


def test_streams_go_on_while_rays_state_is_gone(cell: Cell) -> None:
    if "RAY_REDIS_ADDRESS" not in cell.cluster.environment:
        pytest.skip("there is no redis-server here")
    long, short = cases(6, max_tokens=380), cases(6, max_tokens=20)
    between: list[str] = []
    servers: list[int] = []

    def lose_state() -> None:
        servers.append(cell.cluster.kill_gcs())
        # Others come, and are answered, before there is another one.
        between.extend(cell.stream(short))
        servers.append(cell.cluster.start_gcs())

    assert cell.stream(long, lose_state) == cell.plain(long)
    assert between == cell.plain(short)
    assert servers[0] != servers[1]
    # Ray itself is well again.
    wait_until(lambda: len(cell.workers("TARGET")) == 2, "the scheduler is found")
    assert cell.cluster.scheduler()["throughput"]["failed"] == 0


def test_targets_come_and_go_with_the_load(cell: Cell) -> None:
    """Autoscaling begins while the application runs: a target comes, hands over its sequences and goes."""
    pace = {"max_replicas": 2, "upscale_delay_seconds": 1, "downscale_delay_seconds": 4}
    groups = cell.configuration["groups"]
    autoscaled = {**groups["target"], "replicas": 1, "autoscaling": {**pace, "sequences_per_replica": 8}}
    workers = {worker["worker_id"] for role in ("DRAFT", "TARGET") for worker in cell.workers(role)}
    cell.deploy(groups={**groups, "target": autoscaled})
    seen: list[dict[str, Any]] = []

    def targets(count: int) -> bool:
        """Whether so many are in use and no other is there; what the scheduler said of them is kept."""
        status = cell.cluster.scheduler()
        if status is None:
            return False
        seen.append(status)
        states = [one["state"] for one in status["workers"] if one["role"] == "ROLE_TARGET"]
        return states == ["WORKER_STATE_IN_USE"] * count

    application = Application(cell.url, f"127.0.0.1:{cell.grpc_port}", MODEL, 0, {})
    asked = cases(8, max_tokens=380)
    expected = oracle(cell.plain, asked)

    async def load(streams: int, until: Callable[[], bool]) -> list[str]:
        async with streaming(application) as client, ConstantLoad(client, asked, streams) as load:
            await asyncio.to_thread(wait_until, until, f"{streams} streams", 2 * LONG)
        assert len(load.records) >= streams
        return faults_of(load.records, expected)

    wait_until(lambda: targets(1) and seen[-1]["replicas"] is not None, "one target that is autoscaled", 2 * LONG)
    # None was replaced for that.
    assert {worker["worker_id"] for worker in seen[-1]["workers"]} <= workers
    failed = seen[-1]["kv_moves"]["failed"], seen[-1]["throughput"]["failed"], seen[-1]["throughput"]["refused"]
    assert asyncio.run(load(MANY, lambda: targets(2))) == []
    before = seen[-1]
    assert asyncio.run(load(FEW, lambda: targets(1))) == []
    after = seen[-1]
    # Whether anything moves depends on whether the target that leaves has a stream just then.
    assert failed == (0, 0, 0)
    assert (after["kv_moves"]["failed"], after["throughput"]["failed"], after["throughput"]["refused"]) == failed
    assert before["replicas"]["explanation"].startswith("2 targets: ")
    assert after["replicas"]["explanation"].startswith("1 target: ")


def test_a_gateway_comes_with_open_requests_and_one_that_leaves_ends_its_streams(cell: Cell) -> None:
    """Both listen on one port. Streams go on at the one that leaves, and new requests go to the other."""
    gateway = cell.configuration["gateway"]
    scaled = {"max_replicas": 2, "target_ongoing_requests": MANY // 2, "upscale_delay_seconds": 0}
    application = Application(cell.url, f"127.0.0.1:{cell.grpc_port}", MODEL, 0, {})
    asked = cases(8, max_tokens=200)
    expected, balanced = oracle(cell.plain, asked), f"{cell.url}/-/healthz"

    def processes(status: str) -> set[int | None]:
        """Those that have the port of HTTP open in this way."""
        port = int(cell.url.rpartition(":")[2])
        connections = [one for one in psutil.net_connections("tcp") if one.laddr and one.laddr.port == port]
        return {one.pid for one in connections if one.status == status}

    async def load() -> list[str]:
        async with streaming(application) as client, ConstantLoad(client, asked, MANY) as load:
            await asyncio.to_thread(wait_until, lambda: len(processes("LISTEN")) == 2, "a second gateway", 2 * LONG)
            async with streaming(application) as other, ConstantLoad(other, asked, MANY) as more:
                await asyncio.to_thread(wait_until, lambda: len(processes("ESTABLISHED")) == 2, "both have streams")
                cell.deploy()
                await asyncio.to_thread(wait_until, lambda: not answers(balanced), "load balancers hear of it")
                await asyncio.to_thread(wait_until, lambda: len(processes("LISTEN")) == 1, "one gateway listens")
                assert len(processes("ESTABLISHED")) == 2
        return faults_of([*load.records, *more.records], expected)

    cell.deploy(gateway={**gateway, "autoscaling": scaled})
    assert asyncio.run(load()) == []


def test_drafts_come_and_leave(cell: Cell) -> None:
    """A second one, while streams go on and are drafted for; nothing else is replaced for it."""
    groups = cell.configuration["groups"]
    two = {**groups, "draft": {**groups["draft"], "replicas": 2}}
    application = Application(cell.url, f"127.0.0.1:{cell.grpc_port}", MODEL, 0, {})
    asked = cases(8, max_tokens=380)
    expected = oracle(cell.plain, asked)
    targets = {worker["worker_id"] for worker in cell.workers("TARGET")}
    before = cell.cluster.scheduler()["throughput"]

    def proposals() -> int:
        return int(cell.cluster.scheduler()["speculation"]["draft_tokens"])

    def change(drafts: int, **changes: Any) -> None:
        cell.deploy(**changes)
        wait_until(lambda: len(cell.workers("DRAFT")) == drafts, f"{drafts} drafts", 2 * LONG)
        count = proposals()
        wait_until(lambda: proposals() > count, "proposals")

    async def load() -> list[str]:
        async with streaming(application) as client, ConstantLoad(client, asked, len(asked)) as load:
            begin = time.monotonic()
            await asyncio.to_thread(change, 2, groups=two)
            await asyncio.to_thread(change, 1)
            window = Window(begin, time.monotonic())
        longest = pauses(load.records, window)["longest"]
        print(f"\na draft came and left: {len(load.records)} streams, longest pause {longest:.2f} s")
        assert [record for record in load.records if record.refused] == []
        return faults_of(load.records, expected)

    assert asyncio.run(load()) == []
    assert {worker["worker_id"] for worker in cell.workers("TARGET")} == targets
    after = cell.cluster.scheduler()["throughput"]
    assert (after["failed"], after["refused"]) == (before["failed"], before["refused"])


def test_another_draft_model_and_targets_of_two_ranks_change_no_answer(cell: Cell) -> None:
    """Every replica is replaced, the scheduler's too, while requests come all the time; half of them take seconds."""
    _, other = save_tiny_pair("llama", cell.folder / "other", disagreement=0.1)
    save_tokenizer(other)
    models = {**cell.configuration["models"], "draft": str(other)}
    asked = [*cases(2, max_tokens=60), *cases(4, max_tokens=380)[2:]]
    expected = cell.plain(asked)
    epoch = cell.cluster.scheduler()["scheduler_epoch"]
    done = threading.Event()

    def keep_asking(place: int) -> list[bool]:
        right = []
        while not done.is_set():
            right.append(cell.stream([asked[place]]) == [expected[place]])
        return right

    def ids() -> set[str]:
        return {worker["worker_id"] for role in ("DRAFT", "TARGET") for worker in cell.workers(role)}

    before = ids()
    with ThreadPoolExecutor(len(asked)) as pool, setting(done):
        answers = [pool.submit(keep_asking, place) for place in range(len(asked))]
        cell.deploy(models=models, engine=TWO_RANKS)
        wait_until(lambda: len(ids() - before) == 3 == len(ids()), "other workers, and none of before", 3 * LONG)
        done.set()
        right = [answer.result(2 * LONG) for answer in answers]
    assert all(map(all, right))
    assert [worker["model_id"] for worker in cell.workers("DRAFT")] == [str(other)]
    cell.configuration["models"] = models
    status = cell.cluster.scheduler()
    assert (status["throughput"]["failed"], status["scheduler_epoch"] > epoch) == (0, True)
