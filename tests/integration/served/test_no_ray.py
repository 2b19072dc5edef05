"""`spool serve --no-ray`: one machine, without Ray."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen

import psutil
import pytest
import yaml

from bench.chaos.streams import cases
from spool_client import Client, GenerateRequest
from tests.support.command_line import SPOOL, spool, started
from tests.support.ports import free_ports
from tests.support.renumbered import save_renumbered
from tests.support.serving import ENGINE, PACED, PlainDecoder, stream_all
from tests.support.waiting import LONG, wait_until

pytestmark = pytest.mark.slow

MODEL = "tiny"
PROCESSES = ("scheduler", "gateway-0", "gateway-1", "target-0", "draft-0")


class Told:
    """Everything that the command has said so far."""

    def __init__(self, process: Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, line: str, times: int = 1) -> None:
        def heard() -> bool:
            assert self._process.poll() is None, "\n".join(self.lines)
            return self.lines.count(line) >= times

        wait_until(heard, f"{line} in {self.lines}", 2 * LONG)


@dataclass
class NoRay:
    process: Popen[str]
    told: Told
    url: str
    address: str
    environment: dict[str, str]
    folder: Path

    def process_id(self, name: str) -> int:
        """Of the process that `name` is at present."""
        children = psutil.Process(self.process.pid).children()
        (found,) = [child.pid for child in children if child.cmdline()[-1:] == [name]]
        return found

    def kill(self, name: str) -> None:
        os.kill(self.process_id(name), signal.SIGKILL)


@pytest.fixture(scope="module")
def served(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[NoRay]:
    folder = tmp_path_factory.mktemp("no-ray")
    port, grpc_port = free_ports(2)
    target, draft = tiny_pair[0], save_renumbered(tiny_pair[1], folder / "draft", range(95, -1, -1))
    # Streams last longer than it takes to kill something.
    groups, gateway = {"target": PACED}, {"replicas": 2}
    settings = {"engine": ENGINE, "groups": groups, "gateway": gateway, "metrics": {"scheduler_address": None}}
    (folder / "spool.yaml").write_text(yaml.safe_dump(settings))
    environment = {"SPOOL_STATE": str(folder / "state")}
    command = ["serve", target, "--draft", draft, "--served-model-name", MODEL, "--dtype", "float32", "--no-ray"]
    command += ["--port", port, "--grpc-port", grpc_port, "--threads", 1]
    with started(*command, cwd=folder, environment=environment) as process:
        told = Told(process)
        told.wait_for("Ctrl-C stops it.")
        url = f"http://127.0.0.1:{port}"
        yield NoRay(process, told, url, f"127.0.0.1:{grpc_port}", environment, folder)


@pytest.fixture(scope="module")
def plain(tiny_pair: tuple[Path, Path]) -> PlainDecoder:
    return PlainDecoder(tiny_pair[0])


def test_it_answers_as_the_engine_alone(served: NoRay, plain: PlainDecoder) -> None:
    asked = cases(4, max_tokens=16)
    assert asyncio.run(stream_all(served.url, MODEL, asked)) == plain(asked)
    with Client(served.address) as client:
        answer = client.generate(GenerateRequest(text=asked[0].prompt, max_tokens=16, temperature=0))
    assert [choice.text for choice in answer.choices] == plain(asked[:1])


@pytest.mark.parametrize("name", ["target-0", "scheduler"])
def test_what_dies_is_started_again_and_streams_go_on(served: NoRay, plain: PlainDecoder, name: str) -> None:
    asked = cases(3, max_tokens=60)
    before = served.process_id(name)
    answers = asyncio.run(stream_all(served.url, MODEL, asked, on_start=lambda: served.kill(name)))
    assert answers == plain(asked)
    served.told.wait_for(f"{name}: up", times=2)
    assert served.process_id(name) != before
    assert f"{name}: died: killed by signal 9" in served.told.lines


def test_a_gateway_is_started_again(served: NoRay, plain: PlainDecoder) -> None:
    served.kill("gateway-0")
    served.told.wait_for("gateway-0: up", times=2)
    asked = cases(2, max_tokens=8)
    assert asyncio.run(stream_all(served.url, MODEL, asked)) == plain(asked)


def test_commands_find_it(served: NoRay) -> None:
    shown = spool("status", "--json", environment=served.environment)
    assert shown.code == 0, shown.err
    workers = {worker["worker_id"]: worker["state"] for worker in shown.summary["cells"][0]["workers"]}
    assert workers == dict.fromkeys(("target-0", "draft-0"), "WORKER_STATE_IN_USE")
    logs = spool("logs", "draft", "--tail", "1000", environment=served.environment)
    assert (logs.code, "INFO services.worker.registration: worker draft-0 is in use" in logs.out) == (0, True), logs.err
    nobody = spool("logs", "nobody", environment=served.environment)
    assert nobody.err.endswith(f"there are: {', '.join(sorted(PROCESSES))}\n")
    port = served.url.rpartition(":")[2]
    again = spool("serve", "--no-ray", "--port", port, environment=served.environment, cwd=served.folder)
    assert (again.code, "spool is served already" in again.err) == (2, True), again.err


@pytest.mark.long
def test_another_port_is_another_server(served: NoRay, tiny_pair: tuple[Path, Path]) -> None:
    port, grpc_port = free_ports(2)
    command = ["serve", tiny_pair[0], "--draft", "none", "--dtype", "float32", "--no-ray", "--threads", 1]
    command += ["--port", port, "--grpc-port", grpc_port]
    with started(*command, cwd=served.folder, environment=served.environment) as process:
        told = Told(process)
        told.wait_for("Ctrl-C stops it.")
        assert f"  chat  spool chat --app spool-{port}" in told.lines
        for name, url in (("spool", served.url), (f"spool-{port}", f"http://127.0.0.1:{port}")):
            shown = spool("status", "--app", name, "--json", environment=served.environment)
            assert (shown.code, shown.summary["addresses"]["http"]) == (0, url), shown.err
        stopped = spool("down", "--app", f"spool-{port}", environment=served.environment)
        assert (stopped.code, process.wait(LONG)) == (0, 0), stopped.err
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
    assert following.stdout.readline().startswith("draft-0: ")
    assert children == {child.pid for child in psutil.Process(served.process.pid).children(recursive=True)}
    # It sends SIGTERM to the command alone.
    stopped = spool("down", environment=served.environment)
    assert (stopped.code, stopped.err) == (0, "spool is stopped\n")
    assert served.process.wait(LONG) == 0, served.told.lines
    assert [child for child in children if psutil.pid_exists(child)] == []
    followed = {line.partition(": ")[0] for line in following.communicate(timeout=LONG)[0].splitlines()}
    assert followed & (set(PROCESSES) - {"draft-0"})
    assert following.returncode == 0
    assert spool("status", environment=served.environment).code == 1
    assert idle.sock.recv(1) == b""
    refused = whole.getresponse()
    assert (refused.status, refused.headers["connection"]) == (503, "close")
    assert json.load(refused)["error"]["message"] == "the server stops, before the answer is complete"
    *_, error, end = events.read().decode().strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert end == "data: [DONE]"


def test_processes_end_with_whoever_keeps_them(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """However that ends, and whatever they are doing: here, loading."""
    port, grpc_port = free_ports(2)
    command = ["serve", tiny_pair[0], "--draft", "ngram", "--no-ray", "--port", port, "--grpc-port", grpc_port]
    with started(*command, cwd=tmp_path, environment={"SPOOL_STATE": str(tmp_path / "state")}) as process:
        Told(process).wait_for("target-0: starting")
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.kill()
        process.wait(LONG)
        assert psutil.wait_procs(children, LONG)[1] == []
