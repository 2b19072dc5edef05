"""The application as it is shipped (dtype and policy `auto`, the CPU kernels) on real Ray under constant load: while
its processes are killed and stopped, and beyond its load."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.chaos.application import DRAFT, TARGET, Application, watching
from bench.chaos.faults import Faults
from bench.chaos.streams import Answer, Case, ConstantLoad, Protocol, cases, faults_of, streaming
from engine.cpu.isa import AUTO, chosen_isa
from tests.support.changed_workers import POISON, dying_of_poison
from tests.support.command_line import save_tokenizer
from tests.support.ray_cluster import RayCluster
from tests.support.serving import PACED, PlainDecoder, oracle, served_on
from tests.support.tiny_models import save_tiny_pair

pytestmark = [pytest.mark.slow, pytest.mark.ray]

STREAMS = 16
WORKERS = {"draft": 2, "target": 2}
# While a new scheduler has no workers yet, every stream waits in the queue, and none may be refused for that.
QUEUE = STREAMS + 8
# Not a share of this machine's memory, which other tests use too.
PAGES = {"kv_pages": 512}
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
    """What every request must get. Half of them ask for drafts, whatever `auto` thinks of what these models cost. Some
    are structured, by a grammar that is not complete before their end."""
    structured = [Case("Fill this in: ", 100 + n, 0.8, 200, regex=FORM, stop_token_ids=(LINE_END,)) for n in range(4)]
    answers = oracle(PlainDecoder(pair[0], "bfloat16", PAGES), [*cases(6, max_tokens=200), *structured])
    assert all(re.match("[a-z]{2,4} [0-9]{1,3}[;,] ", answers[case].text) for case in structured)
    return {replace(case, draft_length=(None, 4)[case.seed // 2 % 2]): answer for case, answer in answers.items()}


@pytest.fixture(scope="module")
def application(
    ray_cluster: RayCluster, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Application]:
    target, draft = pair
    two = {"replicas": 2, "threads": 1, "drain_seconds": 5}
    configuration = {
        "models": {"target": str(target), "draft": str(draft), "served_model_name": "tiny"},
        "engine": PAGES,
        "scheduling": {"batch_size": 4, "max_running": STREAMS, "max_queued_sequences": QUEUE},
        "groups": {"draft": two | PACED, "target": two | {"environment": dying_of_poison()}},
        "gateway": {"replicas": 2, "http_on": "head_node", "drain_seconds": 2},
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


def test_processes_that_die_or_stop_change_no_text(
    ray_cluster: RayCluster, application: Application, expected: dict[Case, Answer]
) -> None:
    before = ray_cluster.scheduler()["scheduler_epoch"]

    async def run() -> None:
        async with streaming(application) as client, watching(application) as watcher:
            async with ConstantLoad(client, list(expected), STREAMS) as load:
                faults = Faults(application, watcher, load, WORKERS, SECONDS)
                killed = [await faults.kill_worker(DRAFT), await faults.kill_worker(TARGET)]
                killed.append(await faults.kill_scheduler())
                stopped = await faults.stop_target(None)
            assert faults_of(load.records, expected) == []
            structured = [one for one in load.records if one.case.regex and one.case.draft_length and one.arrivals]
            for struck in killed:
                assert any(one.arrivals[0] < struck.window.begin < one.arrivals[-1] for one in structured), struck
            assert sum(record.answered for record in load.records) == len(load.records) >= STREAMS
            assert len({one.process_id for one in [*killed, stopped]}) == 4
            await watcher.until(lambda report: report.idle, "no sequence and no page", SECONDS)

    asyncio.run(run())
    status = ray_cluster.scheduler()
    # The next scheduler has the next number, and not a later time.
    assert before < status["scheduler_epoch"] < before + 10 * EPOCHS
    assert status["throughput"]["acceptance_rate"] > 0


def test_prompts_that_kill_take_two_targets_each_and_no_other_stream(
    application: Application, expected: dict[Case, Answer]
) -> None:
    async def run() -> None:
        async with streaming(application) as client, watching(application) as watcher:
            before = application.workers_lost()
            async with ConstantLoad(client, list(expected), STREAMS) as load:
                poisoned = [Case((*POISON, 20 + number), number, 0.0, 16) for number in range(2)]
                asked = zip(poisoned, Protocol, strict=True)
                poisons = [await client.ask(case, protocol) for case, protocol in asked]
            assert faults_of(load.records, expected) == []
            assert all("a target worker was lost while it computed this sequence" in one.error for one in poisons)
            assert 0 < application.workers_lost() - before <= 2 * len(poisons)
            await watcher.until(lambda report: report.idle, "no sequence and no page", SECONDS)

    asyncio.run(run())


def test_overload_is_refused_and_leaves_nothing(application: Application, expected: dict[Case, Answer]) -> None:
    """Over each protocol, more requests at once than may run and wait."""

    async def run() -> None:
        async with streaming(application) as client, watching(application) as watcher:
            asked = list(islice(cycle(expected), 2 * (STREAMS + QUEUE)))
            # One after the other: requests over HTTP take longer to arrive, so that those over gRPC find room before.
            for protocol in Protocol:
                records = await asyncio.gather(*(client.ask(case, protocol) for case in asked))
                assert faults_of(records, expected) == []
                assert any(record.refused for record in records)
                assert sum(record.answered for record in records) >= STREAMS
            await watcher.until(lambda report: report.idle, "no sequence and no page", SECONDS)

    asyncio.run(run())
