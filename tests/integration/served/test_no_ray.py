"""`spool serve --no-ray`: one machine, without Ray."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen

import httpx
import psutil
import pytest

from bench.chaos.streams import cases
from spool.client import Client, GenerateRequest
from tests.support.command_line import SPOOL, spool
from tests.support.no_ray import NoRay, served_without_ray
from tests.support.renumbered import save_renumbered
from tests.support.serving import ENGINE, PACED, PlainDecoder, stream_all
from tests.support.waiting import LONG

pytestmark = pytest.mark.slow

MODEL = "tiny"
PROCESSES = ("scheduler", "gateway-0", "gateway-1", "target-0", "draft-0")


# Streams last longer than it takes to kill something.
SETTINGS = {"engine": ENGINE, "groups": {"target": PACED}, "gateway": {"replicas": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("no-ray")


@pytest.fixture(scope="module")
def served(tiny_pair: tuple[Path, Path], folder: Path) -> Iterator[NoRay]:
    target, draft = tiny_pair[0], save_renumbered(tiny_pair[1], folder / "draft", range(95, -1, -1))
    models = (target, "--draft", draft, "--draft-in", "workers", "--served-model-name", MODEL, "--dtype", "float32")
    with served_without_ray(folder, *models, **SETTINGS) as served:
        served.wait_until_up()
        yield served


@pytest.fixture(scope="module")
def plain(tiny_pair: tuple[Path, Path]) -> PlainDecoder:
    return PlainDecoder(tiny_pair[0])


def test_it_answers_as_the_engine_alone(served: NoRay, plain: PlainDecoder) -> None:
    asked = cases(4, max_tokens=16)
    assert asyncio.run(stream_all(served.url, MODEL, asked)) == plain(asked)
    with Client(served.address) as client:
        answer = client.generate(GenerateRequest(text=asked[0].prompt, max_tokens=16, temperature=0))
    assert [choice.text for choice in answer.choices] == plain(asked[:1])


@pytest.mark.parametrize("name", ["target-0", "scheduler", "gateway-0"])
def test_what_dies_is_started_again_and_streams_go_on(served: NoRay, plain: PlainDecoder, name: str) -> None:
    """Those of another gateway, where it is a gateway."""
    asked = cases(3, max_tokens=60)
    before = served.process_id(name)
    if name == "gateway-0":
        served.kill(name)
        answers = asyncio.run(stream_all(served.url, MODEL, asked))
    else:
        answers = asyncio.run(stream_all(served.url, MODEL, asked, on_start=lambda: served.kill(name)))
    assert answers == plain(asked)
    served.wait_until_up()
    assert served.process_id(name) != before
    assert f"{name}: died: killed by signal 9" in served.lines


def test_a_gateway_that_gets_sigterm_ends_its_streams_first(served: NoRay, plain: PlainDecoder) -> None:
    asked = cases(8, max_tokens=120)  # over both gateways, and longer than everything together has to stop

    def stop() -> None:
        served.kill("gateway-0", by=signal.SIGTERM)
        served.kill("gateway-1", by=signal.SIGTERM)

    assert asyncio.run(stream_all(served.url, MODEL, asked, on_start=stop)) == plain(asked)
    served.wait_until_up()
    assert {"gateway-0: died: exit code 0", "gateway-1: died: exit code 0"} <= {*served.lines}


def test_a_target_that_gets_sigterm_hands_its_sequences_over(
    tiny_pair: tuple[Path, Path], tmp_path: Path, plain: PlainDecoder
) -> None:
    models = (tiny_pair[0], "--draft", "none", "--served-model-name", MODEL, "--dtype", "float32")
    with served_without_ray(tmp_path, *models, "--target-replicas", 2, **SETTINGS) as served:
        served.wait_until_up()
        asked = cases(6, max_tokens=120)

        def stop() -> None:
            served.kill("target-0", by=signal.SIGTERM)

        assert asyncio.run(stream_all(served.url, MODEL, asked, on_start=stop)) == plain(asked)
        served.wait_until_up()
        assert "target-0: died: exit code 0" in served.lines
        cell = spool("status", "--json", environment=served.environment).summary["cells"][0]
        assert cell["kv_moves"]["moves"] + cell["kv_moves"]["rehomed"] > 0


def test_commands_find_it(served: NoRay, folder: Path) -> None:
    shown = spool("status", "--json", environment=served.environment)
    assert shown.code == 0, shown.err
    workers = {worker["worker_id"]: worker["state"] for worker in shown.summary["cells"][0]["workers"]}
    assert workers == dict.fromkeys(("target-0", "draft-0"), "WORKER_STATE_IN_USE")
    logs = spool("logs", "draft", "--tail", "1000", environment=served.environment)
    line = "INFO spool.services.worker.registration: worker draft-0 is in use"
    assert (logs.code, line in logs.out) == (0, True), logs.err
    nobody = spool("logs", "nobody", environment=served.environment)
    assert nobody.err.endswith(f"there are: {', '.join(sorted(PROCESSES))}\n")
    assert {f"  page  {served.url}/dashboard", f"  metrics  {served.url}/metrics"} <= {*served.lines}
    for path in ("dashboard", "metrics"):
        assert httpx.get(f"{served.url}/{path}").status_code == 200
    port = served.url.rpartition(":")[2]
    again = spool("serve", "--no-ray", "--port", port, environment=served.environment, cwd=folder)
    assert (again.code, "spool is served already" in again.err) == (2, True), again.err


@pytest.mark.long
def test_another_port_is_another_server(served: NoRay, tiny_pair: tuple[Path, Path], folder: Path) -> None:
    models = (tiny_pair[0], "--draft", "none", "--dtype", "float32")
    with served_without_ray(folder, *models, **SETTINGS) as other:
        other.wait_until_up()
        port = other.url.rpartition(":")[2]
        assert f"  chat  spool chat --app spool-{port}" in other.lines
        for name, url in (("spool", served.url), (f"spool-{port}", other.url)):
            shown = spool("status", "--app", name, "--json", environment=served.environment)
            assert (shown.code, shown.summary["addresses"]["http"]) == (0, url), shown.err
        stopped = spool("down", "--app", f"spool-{port}", environment=served.environment)
        assert (stopped.code, other.process.wait(LONG)) == (0, 0), stopped.err
    assert spool("status", environment=served.environment).code == 0


def test_down_leaves_no_process_and_cuts_no_connection(served: NoRay) -> None:
    idle, whole, stream = [http.client.HTTPConnection(served.url.removeprefix("http://")) for _ in range(3)]
    idle.request("GET", "/ping")
    assert idle.getresponse().read()
    # More than ends before the server does.
    asked = {"prompt": "a", "max_tokens": 400, "n": 32, "ignore_eos": True, "spool": {"speculation": False}}
    for connection, streamed in ((whole, False), (stream, True)):
        body = json.dumps(asked | {"stream": streamed})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    events = stream.getresponse()
    assert events.readline().startswith(b"data: {")
    children = {served.process_id(name) for name in PROCESSES}
    following = Popen([SPOOL, "logs", "--follow"], env={**os.environ, **served.environment}, stdout=PIPE, text=True)
    assert following.stdout is not None
    assert following.stdout.readline().startswith("==> ")
    assert children == {child.pid for child in psutil.Process(served.process.pid).children(recursive=True)}
    # It sends SIGTERM to the command alone.
    stopped = spool("down", environment=served.environment)
    assert (stopped.code, stopped.err) == (0, "spool is stopped\n")
    assert served.process.wait(LONG) == 0, served.lines
    assert [child for child in children if psutil.pid_exists(child)] == []
    followed = following.communicate(timeout=LONG)[0]
    assert all(f"/{name}.log <==" in followed for name in ("scheduler", "gateway-0", "gateway-1"))
    assert following.returncode == 0
    assert spool("status", environment=served.environment).code == 1
    assert idle.sock.recv(1) == b""
    refused = whole.getresponse()
    assert (refused.status, refused.headers["connection"]) == (503, "close")
    assert json.load(refused)["error"]["message"] == "the server stops, before the answer is complete"
    *_, error, end = events.read().decode().strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert end == "data: [DONE]"


def test_targets_run_the_draft_as_well(tiny_pair: tuple[Path, Path], tmp_path: Path, plain: PlainDecoder) -> None:
    """One of two dies, and its sequences' drafts begin anew in the other."""
    target, draft = tiny_pair[0], save_renumbered(tiny_pair[1], tmp_path / "draft", range(95, -1, -1))
    inside = ("--draft", draft, "--draft-in", "targets", "--policy", "ragged")
    models = (target, *inside, "--served-model-name", MODEL, "--dtype", "float32", "--target-replicas", 2)
    with served_without_ray(tmp_path, *models, **SETTINGS) as served:
        served.wait_until_up()
        asked = cases(6, max_tokens=60)
        assert asyncio.run(stream_all(served.url, MODEL, asked, lambda: served.kill("target-0"))) == plain(asked)
        cell = spool("status", "--json", environment=served.environment).summary["cells"][0]
        assert {worker["role"] for worker in cell["workers"]} == {"ROLE_TARGET"}
        assert (cell["throughput"]["workers_lost"], cell["speculation"]["accepted_tokens"] > 20) == (1, True)


def test_two_servers_that_start_at_once(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Each is found under a name of its own, and says where its metrics are, also where the default is taken."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
    models = (tiny_pair[0], "--draft", "none", "--dtype", "float32")
    auth = {"api_keys": ["key-in-the-file"], "api_keys_env": "KEYS", "metrics_keys_env": "METRICS_KEYS"}
    settings = {"engine": ENGINE, "metrics": {}, "auth": auth}
    shared = {"SPOOL_STATE": str(tmp_path / "state"), "KEYS": "key-of-a-client", "METRICS_KEYS": "key-of-a-monitor"}
    with (
        served_without_ray(one, *models, environment=shared, **settings) as first,
        served_without_ray(other, *models, environment=shared, **settings) as second,
    ):
        found = {}
        for served in (first, second):
            served.wait_until_up()
            (address,) = [line.split()[-1] for line in served.lines if line.startswith("  metrics  ")]
            (chat,) = [line for line in served.lines if line.startswith("  chat  spool chat")]
            assert "spool_scheduler_uptime_seconds" in httpx.get(address, timeout=LONG).text
            app = chat.partition("--app ")[2] or "spool"
            shown = spool("status", "--app", app, "--json", environment=shared)
            assert (shown.code, shown.summary["addresses"]["http"]) == (0, served.url), shown.err
            found[app] = address
            # Only gateways know the keys of clients.
            for name in ("scheduler", "target-0", "gateway-0"):
                environment = str(psutil.Process(served.process_id(name)).environ())
                known = [key in environment for key in ("key-in-the-file", "key-of-a-client", "key-of-a-monitor")]
                assert known == [name == "gateway-0"] * 3, name
            page = f"{served.url}/metrics"
            codes = [
                httpx.get(page, headers={"authorization": f"Bearer {key}"}, timeout=LONG).status_code
                for key in ("key-in-the-file", "key-of-a-client", "key-of-a-monitor", "key-of-nobody")
            ]
            assert codes == [200, 200, 200, 401]
        assert len(set(found.values())) == 2
        assert "spool" in found


def test_processes_end_with_whoever_keeps_them(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """However that ends, and whatever they are doing: here, loading."""
    with served_without_ray(tmp_path, tiny_pair[0], "--draft", "ngram") as served:
        served.wait_for("target-0: starting")
        children = psutil.Process(served.process.pid).children(recursive=True)
        assert children
        served.process.kill()
        served.process.wait(LONG)
        assert psutil.wait_procs(children, LONG)[1] == []
