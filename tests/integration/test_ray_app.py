"""The application on real Ray: a cluster of logical nodes, and `spool serve` on its own."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import yaml

from engine.model_source import CACHE_VARIABLE, cache_folder
from protos import generation_pb2, generation_pb2_grpc
from tests.support.command_line import SPOOL, save_tokenizer, spool
from tests.support.ray_cluster import RayCluster
from tests.support.serving import ENGINE, Ask, PlainDecoder, free_ports, requests, stream_all
from tests.support.tiny_models import save_tiny_pair

ROOT = Path(__file__).parents[2]
MODEL = "tiny"
DEMO_CACHE = cache_folder()
NODES = [{"control": 1.0}, {"small_gpu": 1.0}, {"small_gpu": 1.0}, {"large_gpu": 1.0}, {"large_gpu": 1.0}]


@dataclass(frozen=True)
class Served:
    """An application with two replicas of each kind but the scheduler."""

    cluster: RayCluster
    environment: dict[str, str]
    plain: PlainDecoder
    url: str
    grpc_port: int

    def replicas(self, deployment: str) -> list[dict[str, Any]]:
        """The live actors of a deployment."""
        actors = self.cluster.actors()
        return [one for one in actors if f"spool#{deployment}#" in one["name"] and one["state"] == "ALIVE"]

    def workers(self, role: str) -> list[dict[str, Any]]:
        """Workers in use, as the scheduler knows them; none while there is no scheduler."""
        status = self.cluster.scheduler()
        workers = status["workers"] if status is not None else []
        return [one for one in workers if one["role"] == f"ROLE_{role}" and one["state"] == "WORKER_STATE_IN_USE"]

    def stream(self, asked: list[Ask], on_start: Callable[[], None] | None = None) -> list[str]:
        return asyncio.run(stream_all(self.url, MODEL, asked, on_start))


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Target and draft; what is calibrated for them is kept for all that is started here."""
    folders = save_tiny_pair("llama", tmp_path_factory.mktemp("models"))
    for folder in folders:
        save_tokenizer(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield folders


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> PlainDecoder:
    return PlainDecoder(pair[0])


@pytest.fixture(scope="module")
def served(pair: tuple[Path, Path], plain: PlainDecoder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    target, draft = pair
    http_port, grpc_port = free_ports(2)
    folder = tmp_path_factory.mktemp("served")
    with RayCluster(NODES) as cluster:
        configuration = {
            "models": {"target": str(target), "draft": str(draft), "served_name": MODEL, "dtype": "float32"},
            "engine": ENGINE,
            "scheduling": {"batch_size": 4, "window": 16},
            "groups": {
                "draft": {"replicas": 2, "resources": {"small_gpu": 1}, "threads": 1, "drain_seconds": 5},
                "target": {"replicas": 2, "resources": {"large_gpu": 1}, "threads": 1, "drain_seconds": 5},
            },
            "scheduler": {"resources": {"control": 0.1}},
            "gateway": {
                "replicas": 2,
                "resources": {"control": 0.1},
                "http_port": http_port,
                "grpc_port": grpc_port,
                "http_on": "head_node",
                "drain_seconds": 2,
            },
            "ray": {"address": cluster.address},
        }
        file = folder / "spool.yaml"
        file.write_text(yaml.safe_dump(configuration))
        environment = {**cluster.environment, "SPOOL_STATE": str(folder / "state")}
        ended = spool("serve", "--config", file, "--detach", environment=environment)
        assert ended.code == 0, ended.err
        again = spool("serve", "--config", file, environment=environment)
        assert (again.code, "is served already" in again.err) == (2, True)
        yield Served(cluster, environment, plain, f"http://127.0.0.1:{http_port}", grpc_port)
        assert spool("down", environment=environment).code == 0
        wait_until(
            lambda: not any("spool#" in one["name"] for one in cluster.actors() if one["state"] == "ALIVE"), "down"
        )


def test_drafts_and_targets_sit_on_the_nodes_made_for_them(served: Served) -> None:
    drafts, targets = served.replicas("DraftWorker"), served.replicas("TargetWorker")
    assert [one["resources"] for one in drafts] == [["small_gpu"]] * 2
    assert [one["resources"] for one in targets] == [["large_gpu"]] * 2
    assert len({one["node"] for one in drafts + targets}) == 4


def test_gateways_and_scheduler_have_not_loaded_torch(served: Served) -> None:
    def loaded(deployment: str) -> list[bool]:
        processes = [one["process_id"] for one in served.replicas(deployment)]
        return ["libtorch" in Path(f"/proc/{process}/maps").read_text() for process in processes]

    assert loaded("Gateway") == [False, False]
    assert loaded("Scheduler") == [False]
    assert loaded("TargetWorker") == [True, True]


def test_answers_are_plain_decoding_over_both_targets(served: Served) -> None:
    asked = requests(12, max_tokens=60)
    busy: set[str] = set()

    def look() -> None:
        busy.update(one["worker_id"] for one in served.workers("TARGET") if one["sequences"])

    assert served.stream(asked, on_start=look) == served.plain(asked)
    assert len(busy) == 2
    status = served.cluster.scheduler()
    assert status["throughput"]["acceptance_rate"] > 0.2
    assert status["pool"]["pool"] == 0
    assert [one["free_pages"] for one in served.workers("TARGET")] == [ENGINE["kv_pages"]] * 2


def test_two_gateways_on_one_node_share_the_grpc_port(served: Served) -> None:
    asked = requests(1, max_tokens=8)
    channels = [
        # Channels with the same options would share one connection.
        grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}", [("grpc.use_local_subchannel_pool", 1)])
        for _ in range(24)
    ]
    request = generation_pb2.GenerateRequest(model=MODEL, text=asked[0].prompt, max_tokens=8, temperature=0)
    texts = {generation_pb2_grpc.GenerationStub(channel).Generate(request).choices[0].text for channel in channels}
    assert texts == set(served.plain(asked))
    for gateway in served.replicas("Gateway"):
        connections = psutil.Process(gateway["process_id"]).net_connections("tcp")
        taken = [one for one in connections if one.status == "ESTABLISHED" and one.laddr.port == served.grpc_port]
        assert taken, "the kernel gave one of the gateways no connection"
    for channel in channels:
        channel.close()


def test_clients_that_go_away_leave_nothing(served: Served) -> None:
    asked = requests(120, max_tokens=300)
    rng = random.Random(1)
    delays = [rng.uniform(0, 1.5) for _ in asked]

    async def over_http(client: httpx.AsyncClient, ask: Ask) -> None:
        body = {"model": MODEL, "prompt": ask.prompt, "max_tokens": ask.max_tokens, "seed": ask.seed, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                pass

    async def over_grpc(stub: generation_pb2_grpc.GenerationStub, ask: Ask) -> None:
        request = generation_pb2.GenerateRequest(model=MODEL, text=ask.prompt, max_tokens=ask.max_tokens, seed=ask.seed)
        async for _ in stub.GenerateStream(request):
            pass

    async def run() -> int:
        async with (
            httpx.AsyncClient(base_url=served.url, timeout=60) as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel,
        ):
            stub = generation_pb2_grpc.GenerationStub(channel)
            calls = [
                asyncio.create_task(over_grpc(stub, ask) if number % 2 else over_http(client, ask))
                for number, ask in enumerate(asked)
            ]
            loop = asyncio.get_running_loop()
            for call, delay in zip(calls, delays, strict=True):
                loop.call_later(delay, call.cancel)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            return sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)

    assert asyncio.run(run()) > len(asked) / 2

    def nothing_left() -> bool:
        pages = [one["total_pages"] - one["free_pages"] for one in served.workers("TARGET")]
        return served.cluster.scheduler()["pool"]["pool"] == 0 and pages == [0, 0]

    wait_until(nothing_left, "no sequence and no page", 2)


@pytest.mark.parametrize("deployment", ["workers", "scheduler"])
def test_killed_processes_change_no_text(served: Served, deployment: str) -> None:
    asked = requests(10, max_tokens=250)
    killed: list[int] = []

    def kill() -> None:
        assert served.cluster.scheduler()["pool"]["pool"] == len(asked)
        if deployment == "scheduler":
            killed.extend(one["process_id"] for one in served.replicas("Scheduler"))
        else:
            busy = [one for one in served.workers("TARGET") if one["sequences"]]
            killed.extend(one["process_id"] for one in (busy[0], served.workers("DRAFT")[0]))
        for process in killed:
            os.kill(process, signal.SIGKILL)

    assert served.stream(asked, on_start=kill) == served.plain(asked)
    assert killed
    wait_until(lambda: len(served.workers("TARGET")) == len(served.workers("DRAFT")) == 2, "workers are back")
    assert served.stream(asked[:2]) == served.plain(asked[:2])


@dataclass(frozen=True)
class OwnRay:
    """Where `spool serve` keeps its own things in a test, and what it is told."""

    environment: dict[str, str]
    options: tuple[str, ...]
    url: str
    grpc_address: str

    def left(self) -> list[str]:
        """Processes that belong to its Ray."""
        folder = self.environment["TMPDIR"]
        return [one.name() for one in psutil.process_iter() if folder in " ".join(_command(one))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def own_ray(tmp_path: Path) -> Iterator[OwnRay]:
    http_port, grpc_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="spool-") as folder:
        environment = {"SPOOL_STATE": str(tmp_path / "state"), "HOME": str(tmp_path), "TMPDIR": folder}
        ports = ("--set", f"gateway.http_port={http_port}", "--set", f"gateway.grpc_port={grpc_port}")
        own = OwnRay(environment, ports, f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}")
        yield own
        spool("down", environment=environment)
        wait_until(lambda: own.left() == [], "nothing is left of Ray", 20)


def test_serve_until_interrupted(own_ray: OwnRay, pair: tuple[Path, Path], plain: PlainDecoder) -> None:
    target = pair[0]
    asked = requests(2, max_tokens=20)
    models = ("--set", f"models={{target: {target}, draft: ngram, dtype: float32, served_name: {MODEL}}}")
    command = [str(SPOOL), "serve", *own_ray.options, *models, "--set", f"engine={json.dumps(ENGINE)}"]
    environment = {**os.environ, **own_ray.environment}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = ""
        for line in process.stderr:
            told += line
            if "Ctrl-C stops it" in line:
                break
        assert f"HTTP  {own_ray.url}/v1" in told, told
        assert asyncio.run(stream_all(own_ray.url, MODEL, asked)) == plain(asked)
        assert httpx.get(f"{own_ray.url}/-/routes").status_code == 404
        assert spool("serve", *own_ray.options, environment=own_ray.environment).err == (
            "spool: spool is served already (`spool down` stops it; ray.app_name names another)\n"
        )
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 0, rest
    assert spool("status", environment=own_ray.environment).code == 1
    assert not (Path(own_ray.environment["HOME"]) / ".ray").exists()


def readme_programs(own: OwnRay) -> dict[str, list[str]]:
    """What README.md says to try, against the ports of a test."""
    section = (ROOT / "README.md").read_text().partition("## Serve\n")[2].partition("\n## ")[0]
    section = section.replace("http://127.0.0.1:8000", own.url).replace("127.0.0.1:8001", own.grpc_address)
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", section, re.MULTILINE)
    texts = [textwrap.dedent(block).strip() for block in blocks]
    programs = {text.split()[0]: ["bash", "-c", text] for text in texts if text.startswith("curl ")}
    programs |= {text.split()[1]: [sys.executable, "-c", text] for text in texts if "import " in text}
    assert sorted(programs) == ["curl", "grpc", "openai"]
    return programs


def test_the_demo_detached(own_ray: OwnRay) -> None:
    environment = {**own_ray.environment, CACHE_VARIABLE: str(DEMO_CACHE)}
    fetched = spool("models", "fetch", "demo", environment=environment)
    if fetched.code != 0:
        pytest.skip(f"the demo model is not to be had: {fetched.err}")
    ended = spool("serve", "--detach", *own_ray.options, environment=environment)
    assert ended.code == 0, ended.err
    assert "curl http" in ended.err
    curl = next(line for line in ended.err.splitlines() if "curl " in line)
    answer = subprocess.run(shlex.split(curl[curl.index("curl ") :]), capture_output=True, text=True, check=True)
    assert "Paris" in json.loads(answer.stdout)["choices"][0]["message"]["content"]
    shown = spool("status", "--json", environment=environment)
    assert shown.code == 0, shown.err
    names = ("Gateway", "Scheduler", "TargetWorker", "DraftWorker")
    replicas = {name: one["replicas"] for name, one in shown.summary["deployments"].items()}
    assert replicas == {name: {"RUNNING": 1} for name in names}
    assert shown.summary["scheduler"]["throughput"]["finished"] == 1
    for name, program in readme_programs(own_ray).items():
        outcome = subprocess.run(program, capture_output=True, text=True, check=False)
        assert outcome.returncode == 0, outcome.stderr
        assert "Paris" in outcome.stdout, f"{name}: {outcome.stdout}"
    chatted = spool("chat", "--temperature", "0", given="What is the capital of France?\n", environment=environment)
    assert "Paris" in chatted.out
    assert spool("down", environment=environment).code == 0
    assert spool("status", environment=environment).code == 1
    assert spool("down", environment=environment).code == 0
