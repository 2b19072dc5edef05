"""What the cpu-demo overlay has Serve run, on real Ray with nodes that offer what its pods offer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.chaos.streams import cases
from spool.client.v1 import generation_pb2, generation_pb2_grpc
from tests.k8s.manifests import overlay
from tests.k8s.monitored import alert_expressions, labels_in, names_in, panel_expressions, relabelled
from tests.support.command_line import spool
from tests.support.ports import free_ports
from tests.support.ray_cluster import RayCluster
from tests.support.serving import ENGINE, PlainDecoder, stream_all
from tests.support.waiting import LONG, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray]

MODEL = "tiny"
# The key that `stream_all` shows.
KEY = "none"
METRICS_KEY = "of-prometheus"
SECRETS = {
    "SPOOL_API_KEYS": f"another,{KEY}",
    "SPOOL_METRICS_KEYS": METRICS_KEY,
    "SPOOL_INTERNAL_TOKEN": "0123456789abcdef0123456789abcdef",
}


@dataclass(frozen=True)
class Cell:
    cluster: RayCluster
    plain: PlainDecoder
    http_port: int
    grpc_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def nodes_of(self, deployment: str) -> list[str]:
        """Where its live replicas are."""
        actors = self.cluster.actors()
        return [one["node"] for one in actors if f"spool#{deployment}#" in one["name"] and one["state"] == "ALIVE"]


def serve_config(folder: Path, models: dict[str, Any], http_port: int, grpc_port: int) -> tuple[Path, list[Any]]:
    """Serve's configuration out of the RayService, for small models on this machine; and what the pods offer."""
    operations = yaml.safe_load((overlay("cpu-demo") / "rendered" / "rayservice.yaml").read_text())
    fields = {one["path"]: one["value"] for one in operations}
    config = yaml.safe_load(fields["/spec/serveConfigV2"])
    (application,) = config["applications"]
    # Where the pods have them from their Secret.
    application["runtime_env"] = {"env_vars": SECRETS}
    settings = application["args"]["settings"]
    settings["models"] = settings["models"] | models
    settings["engine"] = ENGINE
    # Drafts always; `auto` would weigh what steps happen to take.
    settings["scheduling"] = {"policy": "ragged", "batch_size": 4}
    settings["gateway"] |= {"host": "127.0.0.1", "port": http_port, "grpc_port": grpc_port}
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    group = "/spec/rayClusterConfig/workerGroupSpecs"
    pods = [
        {name: float(amount) for name, amount in fields[f"{group}/{number}/resources"].items()}
        for number in range(3)
        for _ in range(fields[f"{group}/{number}/replicas"])
    ]
    return file, pods


@pytest.fixture(scope="module")
def cell(
    ray_cluster: RayCluster, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cell]:
    folder = tmp_path_factory.mktemp("cell")
    target, draft = tiny_pair
    http_port, grpc_port = free_ports(2)
    models = {"target": str(target), "draft": str(draft), "served_model_name": MODEL, "dtype": "float32"}
    file, pods = serve_config(folder, models, http_port, grpc_port)
    gateway, target_pod, draft_pod = pods
    plain = PlainDecoder(target)
    # The head, as in the manifests, has nothing that a replica reserves; one more target's pod is there to move to.
    with ray_cluster.further_nodes([gateway | draft_pod, target_pod, target_pod]) as cluster:
        cluster.deploy(file)
        found = Cell(cluster, plain, http_port, grpc_port)
        wait_until(lambda: healthy(found), "a cell that serves", 2 * LONG)
        yield found


def healthy(cell: Cell) -> bool:
    """What the gateways' readiness probe asks."""
    try:
        return httpx.get(f"{cell.url}/health", timeout=LONG).is_success
    except httpx.TransportError:
        return False


def test_both_apis_answer_who_shows_a_key(cell: Cell) -> None:
    asked = cases(4, max_tokens=40)
    texts = cell.plain(asked)
    assert asyncio.run(stream_all(cell.url, MODEL, asked)) == texts
    with grpc.insecure_channel(f"127.0.0.1:{cell.grpc_port}") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(
            model=MODEL, text=asked[0].prompt, max_tokens=40, seed=asked[0].seed, temperature=0
        )
        with pytest.raises(grpc.RpcError) as refused:
            stub.Generate(request, timeout=LONG)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        answer = stub.Generate(request, metadata=[("authorization", f"Bearer {KEY}")], timeout=LONG)
    assert answer.choices[0].text == texts[0]
    assert httpx.get(f"{cell.url}/v1/models", timeout=LONG).status_code == 401


def test_a_pod_that_ends_hands_over_first(cell: Cell) -> None:
    """The preStop hook of a target's pod while its replica has streams: none of them notices."""
    asked = cases(4, max_tokens=100)
    texts = cell.plain(asked)
    (before,) = cell.nodes_of("TargetWorker")

    def end_pod() -> None:
        ended = spool(
            "k8s", "drain", "--seconds", 200, "--node", before, "--address", cell.cluster.address,
            environment=cell.cluster.environment,
        )  # fmt: skip
        assert ended.code == 0, ended.err

    async def stream_meanwhile() -> None:
        draining = asyncio.create_task(asyncio.to_thread(end_pod))
        while not draining.done():
            assert await stream_all(cell.url, MODEL, asked) == texts
        await draining

    asyncio.run(stream_meanwhile())
    (after,) = cell.nodes_of("TargetWorker")
    assert after != before
    assert cell.cluster.scheduler()["throughput"]["failed"] == 0


def test_the_heads_pod_stays_while_there_are_replicas(cell: Cell) -> None:
    ended = spool(
        "k8s", "drain", "--seconds", 1, "--address", cell.cluster.address, environment=cell.cluster.environment
    )
    assert ended.code == 1
    assert "the head stays until the replicas on other nodes have gone" in ended.err
    assert "not gone within 1 s: spool#" in ended.err
    assert healthy(cell)


def test_alerts_and_dashboard_ask_for_what_the_cell_exports(cell: Cell) -> None:
    """Of the gateway's own page and, as Prometheus takes them, of Ray's metrics ports."""
    page = httpx.get(f"{cell.url}/metrics", headers={"Authorization": f"Bearer {METRICS_KEY}"}, timeout=LONG).text
    own = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    assert len({sample.name for sample in own}) > 10

    def of_scheduler() -> list[dict[str, str]]:
        try:
            texts = [httpx.get(endpoint, timeout=LONG).text for endpoint in set(cell.cluster.metrics())]
        except httpx.ConnectError:
            return []  # Ray names a node that has just gone, or whose port is not open yet
        samples = [one for text in texts for family in text_string_to_metric_families(text) for one in family.samples]
        taken = [relabelled({"__name__": sample.name, **sample.labels}) for sample in samples]
        return [series for series in taken if series is not None]

    wait_until(
        lambda: len({series["__name__"] for series in of_scheduler()}) > 40,
        "Ray has the scheduler's figures",
        pause=1.0,
    )
    series = [{"__name__": sample.name, **sample.labels} for sample in own] + of_scheduler()
    expressions = {**alert_expressions(), **panel_expressions()}
    # Kinds of errors have no sample before the first error, ends none before the first end; there is no certificate.
    begun = {"spool_request_failure_total", "spool_request_success_total", "spool_certificate_expiry_timestamp_seconds"}
    names = {one["__name__"] for one in series} | begun
    assert set().union(*map(names_in, expressions.values())) - names == set()
    labels = {"namespace"}.union(*series)
    assert set().union(*map(labels_in, expressions.values())) - labels <= {"kind", "finished_reason", "server"}
