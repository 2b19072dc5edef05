"""The application as it is shipped (dtype and policy `auto`, the CPU kernels) on real Ray with several logical nodes:
where replicas sit and what they tell, and under constant load while its processes are killed and stopped."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from bench.chaos.application import DRAFT, TARGET, Application, watching
from bench.chaos.faults import Faults
from bench.chaos.streams import Answer, Case, ConstantLoad, Protocol, StreamRecord, cases, faults_of, streaming
from spool.client.v1 import generation_pb2, generation_pb2_grpc
from spool.engine.cpu.isa import AUTO, chosen_isa
from tests.support.changed_workers import POISON, dying_of_poison
from tests.support.command_line import save_tokenizer, spool
from tests.support.ray_cluster import RayCluster
from tests.support.serving import ENGINE, PACED, PlainDecoder, oracle, served_on
from tests.support.tiny_models import save_tiny_pair
from tests.support.waiting import LONG, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray]

MODEL = "tiny"
NODES = [{"control": 1.0, "small_gpu": 2.0}, {"large_gpu": 1.0}, {"large_gpu": 1.0}]
STREAMS = 16
WORKERS = {"draft": 2, "target": 2}
# While a new scheduler has no workers yet, every stream waits in the queue, and none may be refused for that.
QUEUE = STREAMS + 8
SECONDS = 300.0
FORM = "([a-z]{2,4} [0-9]{1,3}[;,] ){60}"
LINE_END = 95
"""Of the tokens of `save_tokenizer`, which has none for the end of a text."""
EPOCHS = 1 << 32
"""Of one scheduler."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = save_tiny_pair("llama", tmp_path_factory.mktemp("models"))
    for folder in folders:
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
        save_tokenizer(folder)
    return folders


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> dict[Case, Answer]:
    """What every request must get. Half of the first ask for drafts, whatever `auto` thinks of what these models cost,
    and all that are structured, by a grammar that is not complete before their end."""
    structured = [Case("Fill this in: ", 100 + n, 0.8, 200, regex=FORM, stop_token_ids=(LINE_END,)) for n in range(4)]
    answers = oracle(PlainDecoder(pair[0], "bfloat16"), [*cases(6, max_tokens=200), *structured])
    assert all(re.match("[a-z]{2,4} [0-9]{1,3}[;,] ", answers[case].text) for case in structured)
    return {
        replace(case, draft_length=4 if case.regex or case.seed // 2 % 2 else None): answer
        for case, answer in answers.items()
    }


@dataclass(frozen=True)
class Served:
    """An application with two replicas of each kind but the scheduler."""

    cluster: RayCluster
    application: Application

    def replicas(self, deployment: str) -> list[dict[str, Any]]:
        """The live actors of a deployment."""
        actors = self.cluster.actors()
        return [one for one in actors if f"spool#{deployment}#" in one["name"] and one["state"] == "ALIVE"]

    def stream(self, asked: Iterable[Case]) -> list[StreamRecord]:
        """Over both protocols in turn."""

        async def run() -> list[StreamRecord]:
            async with streaming(self.application) as client:
                return await asyncio.gather(*map(client.ask, asked, cycle(Protocol)))

        return asyncio.run(run())


@pytest.fixture(scope="module")
def served(
    ray_cluster: RayCluster, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    target, draft = pair
    two = {"replicas": 2, "threads": 1, "drain_seconds": 5}
    configuration = {
        "models": {"target": str(target), "draft": str(draft), "served_model_name": MODEL},
        "engine": ENGINE,
        "scheduling": {"batch_size": 4, "max_running": STREAMS, "max_queued_sequences": QUEUE},
        "groups": {
            "draft": two | PACED | {"resources": {"small_gpu": 1}},
            "target": two | {"resources": {"large_gpu": 1}, "environment": dying_of_poison()},
        },
        "scheduler": {"resources": {"control": 0.1}},
        "gateway": {"replicas": 2, "resources": {"control": 0.1}, "drain_seconds": 2},
        "logging": {"format": "json", "level": "debug"},
        "tracing": {"endpoint": "console"},
    }
    folder = tmp_path_factory.mktemp("served")
    with ray_cluster.further_nodes(NODES) as cluster, served_on(cluster, configuration, folder) as application:
        again = spool("serve", "--config", folder / "spool.yaml", environment=application.environment)
        assert (again.code, "is served already" in again.err) == (2, True)
        yield Served(cluster, application)


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
    for target in targets:
        library = f"/cpu-kernels/{chosen_isa(AUTO).name}-bfloat16-"
        assert library in Path(f"/proc/{target['process_id']}/maps").read_text()


def test_rays_own_metrics_have_every_figure_once(served: Served, expected: dict[Case, Answer]) -> None:
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

    assert faults_of(served.stream(expected), expected) == []
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
    answer = httpx.post(f"{served.application.url}/v1/completions", json=body, headers=headers, timeout=LONG)
    assert answer.headers.get_list("x-request-id") == ["mine-1"]

    def written() -> list[str]:
        files = served.cluster.folder.glob("**/logs/worker-*.err")
        return [line for file in files for line in file.read_text().splitlines()]

    def loggers() -> set[str]:
        return {json.loads(line)["logger"] for line in written() if '"request_id": "mine-1"' in line and line[0] == "{"}

    sides = {
        f"spool.services.{name}" for name in ("gateway.completion", "gateway.http.middleware", "scheduler.session")
    }
    wait_until(lambda: loggers() >= sides, "both have written their lines", pause=0.5)
    # Of request, sequence, queue, prefill and decode.
    wait_until(lambda: sum(f'"trace_id": "0x{trace}"' in line for line in written()) >= 5, "both have told their spans")


def test_two_gateways_on_one_node_share_both_ports(served: Served) -> None:
    url, address = served.application.url, served.application.grpc_address
    # Channels with the same options would share one connection.
    channels = [grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(24)]
    request = generation_pb2.GenerateRequest(model=MODEL, text="a", max_tokens=8, temperature=0)
    stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
    assert len({stub.Generate(request).choices[0].text for stub in stubs}) == 1
    clients = [httpx.Client(base_url=url, timeout=LONG) for _ in range(24)]
    assert {client.get("/ping").status_code for client in clients} == {200}
    ports = {int(one.rpartition(":")[2]) for one in (url, address)}
    for gateway in served.replicas("Gateway"):
        connections = psutil.Process(gateway["process_id"]).net_connections("tcp")
        taken = {one.laddr.port for one in connections if one.status == "ESTABLISHED"}
        assert ports <= taken, "the kernel gave one of the gateways no connection"
    for opened in (*channels, *clients):
        opened.close()


def test_clients_that_go_away_leave_nothing(served: Served) -> None:
    asked = cases(60, max_tokens=300)
    rng = random.Random(1)

    async def run() -> None:
        async with streaming(served.application) as client, watching(served.application) as watcher:
            loop = asyncio.get_running_loop()
            calls = [
                asyncio.create_task(client.ask(case, protocol))
                for case, protocol in zip(asked, cycle(Protocol), strict=False)
            ]
            for call in calls:
                loop.call_later(rng.uniform(0, 1.5), call.cancel)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(isinstance(one, asyncio.CancelledError) for one in outcomes) > len(asked) / 2
            await watcher.until(lambda report: report.idle, "no sequence and no page", SECONDS)

    before = served.cluster.scheduler()["throughput"]["tokens"]
    asyncio.run(run())
    after = served.cluster.scheduler()["throughput"]["tokens"]
    # Not because all has been computed.
    assert after - before < sum(case.max_tokens for case in asked) / 2


def test_processes_that_die_or_stop_change_no_text(served: Served, expected: dict[Case, Answer]) -> None:
    """Half of the streams are structured and drafted, so that some of these run whenever a process is killed."""
    before = served.cluster.scheduler()["scheduler_epoch"]
    structured = [case for case in expected if case.regex]
    others = [case for case in expected if not case.regex]
    asked = [case for pair in zip(cycle(structured), others, strict=False) for case in pair]

    async def run() -> None:
        async with streaming(served.application) as client, watching(served.application) as watcher:
            async with ConstantLoad(client, asked, STREAMS) as load:
                faults = Faults(served.application, watcher, load, WORKERS, SECONDS)
                killed = [await faults.kill_worker(DRAFT), await faults.kill_worker(TARGET)]
                killed.append(await faults.kill_scheduler())
                stopped = [await faults.stop_worker(role, None) for role in (DRAFT, TARGET)]
            assert faults_of(load.records, expected) == []
            ran = [one for one in load.records if one.case in structured and one.arrivals]
            for struck in killed:
                assert any(one.arrivals[0] < struck.window.begin < one.arrivals[-1] for one in ran), struck
            assert sum(record.answered for record in load.records) == len(load.records) >= STREAMS
            assert len({one.process_id for one in [*killed, *stopped]}) == 5
            await watcher.until(lambda report: report.idle, "no sequence and no page", SECONDS)

    asyncio.run(run())
    status = served.cluster.scheduler()
    # The next scheduler has the next number, and not a later time.
    assert before < status["scheduler_epoch"] < before + 10 * EPOCHS
    assert status["throughput"]["acceptance_rate"] > 0


@pytest.mark.long
async def test_prompts_that_kill_take_two_targets_each_and_no_other_stream(
    served: Served, expected: dict[Case, Answer]
) -> None:
    async with streaming(served.application) as client, watching(served.application) as watcher:
        before = served.application.workers_lost()
        async with ConstantLoad(client, list(expected), STREAMS) as load:
            poisoned = [Case((*POISON, 20 + number), number, 0.0, 16) for number in range(2)]
            asked = zip(poisoned, Protocol, strict=True)
            poisons = [await client.ask(case, protocol) for case, protocol in asked]
        assert faults_of(load.records, expected) == []
        assert all("a target worker was lost while it computed this sequence" in one.error for one in poisons)
        assert 0 < served.application.workers_lost() - before <= 2 * len(poisons)
        await watcher.until(lambda report: report.idle, "no sequence and no page", SECONDS)


@pytest.mark.long
async def test_overload_is_refused_and_leaves_nothing(served: Served, expected: dict[Case, Answer]) -> None:
    """Over each protocol, more requests at once than may run and wait."""
    async with streaming(served.application) as client, watching(served.application) as watcher:
        asked = list(islice(cycle(expected), 2 * (STREAMS + QUEUE)))
        # One after the other: requests over HTTP take longer to arrive, so that those over gRPC find room before.
        for protocol in Protocol:
            records = await asyncio.gather(*(client.ask(case, protocol) for case in asked))
            assert faults_of(records, expected) == []
            assert any(record.refused for record in records)
            assert sum(record.answered for record in records) >= STREAMS
        await watcher.until(lambda report: report.idle, "no sequence and no page", SECONDS)
