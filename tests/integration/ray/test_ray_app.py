"""The application on real Ray, on a cluster of logical nodes."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.chaos.application import Application
from bench.chaos.streams import Case, Protocol, cases, streaming
from spool_client.v1 import generation_pb2, generation_pb2_grpc
from tests.support.command_line import spool
from tests.support.ray_cluster import RayCluster
from tests.support.serving import ENGINE, PlainDecoder, served_on, stream_all
from tests.support.waiting import LONG, wait_until

MODEL = "tiny"
pytestmark = [pytest.mark.slow, pytest.mark.ray]

NODES = [{"control": 1.0, "small_gpu": 2.0}, {"large_gpu": 1.0}, {"large_gpu": 1.0}]


@dataclass(frozen=True)
class Served:
    """An application with two replicas of each kind but the scheduler."""

    cluster: RayCluster
    plain: PlainDecoder
    application: Application

    @property
    def url(self) -> str:
        return self.application.url

    def replicas(self, deployment: str) -> list[dict[str, Any]]:
        """The live actors of a deployment."""
        actors = self.cluster.actors()
        return [one for one in actors if f"spool#{deployment}#" in one["name"] and one["state"] == "ALIVE"]

    def workers(self, role: str) -> list[dict[str, Any]]:
        """Workers in use, as the scheduler knows them; none while there is no scheduler."""
        status = self.cluster.scheduler()
        workers = status["workers"] if status is not None else []
        return [one for one in workers if one["role"] == f"ROLE_{role}" and one["state"] == "WORKER_STATE_IN_USE"]

    def stream(self, asked: list[Case], on_start: Callable[[], None] | None = None) -> list[str]:
        return asyncio.run(stream_all(self.url, MODEL, asked, on_start))


@pytest.fixture(scope="module")
def served(
    ray_cluster: RayCluster, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    target, draft = tiny_pair
    configuration = {
        "models": {"target": str(target), "draft": str(draft), "served_model_name": MODEL, "dtype": "float32"},
        "engine": ENGINE,
        # Drafts always; `auto` would weigh what steps happen to take.
        "scheduling": {"batch_size": 4, "max_running": 16, "policy": "ragged"},
        "groups": {
            "draft": {"replicas": 2, "resources": {"small_gpu": 1}, "threads": 1, "drain_seconds": 5},
            "target": {"replicas": 2, "resources": {"large_gpu": 1}, "threads": 1, "drain_seconds": 5},
        },
        "scheduler": {"resources": {"control": 0.1}},
        "gateway": {
            "replicas": 2,
            "resources": {"control": 0.1},
            "http_on": "head_node",
            "drain_seconds": 2,
        },
        "logging": {"format": "json", "level": "debug"},
        "tracing": {"endpoint": "console"},
    }
    folder = tmp_path_factory.mktemp("served")
    with (
        ray_cluster.further_nodes(NODES) as cluster,
        served_on(cluster, configuration, folder) as application,
    ):
        again = spool("serve", "--config", folder / "spool.yaml", environment=application.environment)
        assert (again.code, "is served already" in again.err) == (2, True)
        yield Served(cluster, PlainDecoder(target), application)
        ended = spool("down", environment=application.environment)
        assert ended.code == 0, ended.err
        wait_until(
            lambda: not any("spool#" in one["name"] for one in cluster.actors() if one["state"] == "ALIVE"), "down"
        )


def test_workers_sit_on_the_nodes_made_for_them_and_only_they_load_torch(served: Served) -> None:
    drafts, targets = served.replicas("DraftWorker"), served.replicas("TargetWorker")
    assert [one["resources"] for one in drafts] == [["small_gpu"]] * 2
    assert [one["resources"] for one in targets] == [["large_gpu"]] * 2
    assert len({one["node"] for one in drafts}) == 1
    assert len({one["node"] for one in targets}) == 2

    def loaded(deployment: str) -> list[bool]:
        processes = [one["process_id"] for one in served.replicas(deployment)]
        return ["libtorch" in Path(f"/proc/{process}/maps").read_text() for process in processes]

    assert loaded("Gateway") == [False, False]
    assert loaded("Scheduler") == [False]
    assert loaded("TargetWorker") == [True, True]


def test_answers_are_plain_decoding_over_both_targets(served: Served) -> None:
    asked = cases(8, max_tokens=200)
    busy: set[str] = set()

    def look() -> None:
        busy.update(one["worker_id"] for one in served.workers("TARGET") if one["sequences"])

    assert served.stream(asked, on_start=look) == served.plain(asked)
    assert len(busy) == 2
    status = served.cluster.scheduler()
    assert status["throughput"]["acceptance_rate"] > 0.2
    assert status["live_set"]["live"] == 0
    pages = [ENGINE["kv_pages"]] * 2
    wait_until(lambda: [one["free_pages"] for one in served.workers("TARGET")] == pages, "all pages are free")


def test_rays_own_metrics_have_every_figure_once(served: Served) -> None:
    """From the nodes' endpoints, as Prometheus reads them: the gateways' figures from both, the cell's from one."""

    def told(name: str) -> list[tuple[dict[str, str], float]]:
        texts = [httpx.get(endpoint, timeout=LONG).text for endpoint in set(served.cluster.metrics())]
        return [
            (sample.labels, sample.value)
            for text in texts
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"ray_{name}"
        ]

    asked = cases(4, max_tokens=50)
    served.stream(asked)
    # No client has gone away so far, so what was generated was delivered.
    generated = served.cluster.scheduler()["throughput"]["tokens"]
    wait_until(
        lambda: sum(value for _, value in told("spool_generation_tokens_total")) == generated,
        "Ray has the gateways' tokens",
        pause=1.0,
    )
    wait_until(lambda: bool(told("vllm_spec_decode_num_drafts_total")), "Ray has the scheduler's figures", pause=1.0)
    assert {labels["deployment"] for labels, _ in told("spool_generation_tokens_total")} == {"Gateway"}
    assert {labels["deployment"] for labels, _ in told("spool_spec_decode_num_drafts_total")} == {"Scheduler"}
    assert len(told("spool_spec_decode_num_drafts_total")) == 1
    assert {labels["model_name"] for labels, _ in told("vllm_spec_decode_num_drafts_total")} == {MODEL}
    assert {labels["le"] for labels, _ in told("spool_verify_group_rows_bucket")} >= {"1.0", "+Inf"}


def test_logs_and_traces_of_gateway_and_scheduler_name_the_request(served: Served) -> None:
    trace = "1" * 32
    headers = {"x-request-id": "mine-1", "traceparent": f"00-{trace}-{'2' * 16}-01"}
    body = {"model": MODEL, "prompt": "a", "max_tokens": 3}
    httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=LONG)

    def written() -> list[str]:
        files = served.cluster.folder.glob("**/logs/worker-*.err")
        return [line for file in files for line in file.read_text().splitlines()]

    def loggers() -> set[str]:
        return {json.loads(line)["logger"] for line in written() if '"request_id": "mine-1"' in line and line[0] == "{"}

    sides = {"services.gateway.completion", "services.gateway.http.middleware", "services.scheduler.session"}
    wait_until(lambda: loggers() >= sides, "both have written their lines", pause=0.5)
    # Of request, sequence, queue, prefill and decode.
    wait_until(lambda: sum(f'"trace_id": "0x{trace}"' in line for line in written()) >= 5, "both have told their spans")


def test_two_gateways_on_one_node_share_the_grpc_port(served: Served) -> None:
    address = served.application.grpc_address
    # Channels with the same options would share one connection.
    channels = [grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(24)]
    [asked] = cases(1, max_tokens=8)
    request = generation_pb2.GenerateRequest(model=MODEL, text=str(asked.prompt), max_tokens=8, temperature=0)
    stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
    texts = {stub.Generate(request).choices[0].text for stub in stubs}
    assert texts == set(served.plain([asked]))
    port = int(address.rpartition(":")[2])
    for gateway in served.replicas("Gateway"):
        connections = psutil.Process(gateway["process_id"]).net_connections("tcp")
        taken = [one for one in connections if one.status == "ESTABLISHED" and one.laddr.port == port]
        assert taken, "the kernel gave one of the gateways no connection"
    for channel in channels:
        channel.close()


def test_clients_that_go_away_leave_nothing(served: Served) -> None:
    asked = cases(60, max_tokens=300)
    rng = random.Random(1)

    async def run() -> int:
        async with streaming(served.application) as client:
            loop = asyncio.get_running_loop()
            calls = [
                asyncio.create_task(client.ask(case, protocol))
                for case, protocol in zip(asked, itertools.cycle(Protocol), strict=False)
            ]
            for call in calls:
                loop.call_later(rng.uniform(0, 1.5), call.cancel)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            return sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)

    before = served.cluster.scheduler()["throughput"]["tokens"]
    assert asyncio.run(run()) > len(asked) / 2

    def nothing_left() -> bool:
        pages = [one["total_pages"] - one["free_pages"] for one in served.workers("TARGET")]
        return served.cluster.scheduler()["live_set"]["live"] == 0 and pages == [0, 0]

    wait_until(nothing_left, "no sequence and no page")
    # Not because all has been computed.
    assert served.cluster.scheduler()["throughput"]["tokens"] - before < len(asked) * 300 / 2
