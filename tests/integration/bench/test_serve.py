"""`spool bench serve` against a gateway over stand-in workers, over HTTP and gRPC."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.config import SchedulerConfig
from tests.support.command_line import Ended, spool, write_lines
from tests.support.gateway import Gateways, Served, stand_in_gateways

LOAD = ("--rate", "40", "--seconds", "0.5", "--max-tokens", "6", "--json", "--first-token-bound", "60")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load")
    write_lines(folder / "prompts.jsonl", {"prompt": "abc"}, {"messages": [{"role": "user", "content": "hello"}]})
    return folder


@pytest.fixture(scope="module")
def gateways(folder: Path) -> Iterator[Gateways]:
    gateways = stand_in_gateways(folder / "model", step_seconds=0.001)
    yield gateways
    gateways.close()


def bench(folder: Path, served: Served, *arguments: object, over_grpc: bool = False) -> Ended:
    where = ("--grpc", served.address) if over_grpc else ("--url", served.url)
    return spool("bench", "serve", *where, "--prompts", "prompts.jsonl", *arguments, cwd=folder)


@pytest.mark.parametrize("over_grpc", [False, True])
def test_every_request_of_a_load_is_accounted_for(folder: Path, gateways: Gateways, over_grpc: bool) -> None:
    output = folder / f"load-{over_grpc}.json"
    with gateways.serve() as served:
        ended = bench(folder, served, *LOAD, "--output", output, over_grpc=over_grpc)
        assert ended.code == 0, ended.err
        (load,) = ended.summary["loads"]
        assert load["requests"] == load["answered"] > 5
        assert (load["refused"], load["failed"]) == (0, 0)
        assert load["tokens"] == 6 * load["requests"]
        assert load["first_token_seconds"]["p50"] <= load["first_token_seconds"]["p99"] < load["seconds"]
        assert load["good"] <= load["requests"]
        # A load that is there is kept, another one is added.
        again = bench(folder, served, *LOAD, "--rate", "20", "--output", output, over_grpc=over_grpc)
        assert again.code == 0, again.err
        kept = json.loads(output.read_text())["loads"]
        assert kept[0] == load
        assert [one["rate"] for one in kept] == [40, 20]


@pytest.mark.parametrize("over_grpc", [False, True])
def test_refusals_are_counted_as_such(folder: Path, over_grpc: bool) -> None:
    tight = SchedulerConfig(batch_size=1, max_running=1, max_queued_sequences=1)
    gateways = stand_in_gateways(folder / "model", config=tight, step_seconds=0.05)
    try:
        with gateways.serve() as served:
            output = folder / f"refused-{over_grpc}.json"
            ended = bench(folder, served, *LOAD, "--output", output, over_grpc=over_grpc)
    finally:
        gateways.close()
    assert ended.code == 0, ended.err
    (load,) = ended.summary["loads"]
    assert load["refused"] > 0
    assert load["answered"] > 0
    assert load["answered"] + load["refused"] == load["requests"]


def test_a_server_that_is_not_there_is_said_so(folder: Path) -> None:
    ended = spool("bench", "serve", "--url", "http://127.0.0.1:9", cwd=folder)
    assert ended.code == 2
    assert "does not answer as a server should" in ended.err
