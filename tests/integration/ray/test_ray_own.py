"""`spool serve` with a Ray of its own, as a user starts it."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from bench.chaos.streams import cases
from tests.support.command_line import spool, started
from tests.support.ports import free_ports
from tests.support.ray_cluster import PRIORITY, end, processes_of
from tests.support.serving import ENGINE, PlainDecoder, stream_all
from tests.support.waiting import LONG, wait_until

ROOT = Path(__file__).parents[3]
MODEL = "tiny"

_OTHER_RAY = """
import sys, ray
ray.__version__ = "2.0.0"
print(ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False).address_info["gcs_address"])
sys.stdout.flush()
sys.stdin.read()
"""

pytestmark = [pytest.mark.slow, pytest.mark.ray]


@dataclass(frozen=True)
class OwnRay:
    """Environment and options of `spool serve`, and where it listens."""

    environment: dict[str, str]
    options: tuple[str, ...]
    url: str
    grpc_address: str

    @property
    def process_id(self) -> int:
        """Of the ancestor of all processes of its Ray."""
        served = json.loads((Path(self.environment["SPOOL_STATE"]) / "spool.json").read_text())
        return int(served["process_id"])

    def left(self) -> list[psutil.Process]:
        """Processes that belong to its Ray."""
        return processes_of(self.environment["TMPDIR"])


def beyond_loopback(process_id: int) -> list[tuple[str, str, int]]:
    """Where the process and its descendants listen for other machines: process, address and port."""
    ray = psutil.Process(process_id)
    processes = [ray, *ray.children(recursive=True)]
    assert len(processes) > 5
    found = [
        (one.name(), one_of.laddr) for one in processes for one_of in one.net_connections("tcp") if is_open(one_of)
    ]
    assert found
    return [(name, address.ip, address.port) for name, address in found if not is_loopback(address.ip)]


def is_open(connection: Any) -> bool:
    return bool(connection.status == psutil.CONN_LISTEN)


def is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if address.version == 6 else None
    return (mapped or address).is_loopback


def open_to_others(folder: Path) -> list[Path]:
    """What of a folder other users can reach: nothing below a folder that they may not enter."""
    mode = folder.lstat().st_mode
    if not mode & 0o077:
        return []
    return [folder, *(found for one in folder.iterdir() if one.is_dir() for found in open_to_others(one))]


@pytest.fixture
def own_ray(tmp_path: Path) -> Iterator[OwnRay]:
    http_port, grpc_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="spool-", ignore_cleanup_errors=True) as folder:
        environment = {"SPOOL_STATE": str(tmp_path / "state"), "HOME": str(tmp_path), "TMPDIR": folder, **PRIORITY}
        ports = ("--set", f"gateway.port={http_port}", "--set", f"gateway.grpc_port={grpc_port}")
        own = OwnRay(environment, ports, f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}")
        try:
            yield own
            spool("down", environment=environment)
            wait_until(lambda: own.left() == [], "nothing is left of Ray")
        finally:
            end(own.left())


def test_serve_until_interrupted(own_ray: OwnRay, tiny_pair: tuple[Path, Path]) -> None:
    target, _ = tiny_pair
    asked = cases(2, max_tokens=20)
    models = ("--set", f"models={{target: {target}, draft: ngram, dtype: float32, served_model_name: {MODEL}}}")
    page = "https://page.example"
    models += ("--set", f"gateway.allowed_origins=['{page}']")
    command = ("serve", *own_ray.options, *models, "--set", f"engine={json.dumps(ENGINE)}")
    with started(*command, environment=own_ray.environment) as process:
        assert process.stderr is not None
        told = ""
        for line in process.stderr:
            told += line
            if "Ctrl-C stops it" in line:
                break
        assert f"HTTP  {own_ray.url}/v1" in told, told
        assert beyond_loopback(own_ray.process_id) == []
        assert open_to_others(Path(own_ray.environment["TMPDIR"]) / f"spool-{os.getuid()}") == []
        assert asyncio.run(stream_all(own_ray.url, MODEL, asked)) == PlainDecoder(target)(asked)
        asked_by_browser = {"origin": page, "access-control-request-method": "POST"}
        preflight = httpx.options(f"{own_ray.url}/v1/completions", headers=asked_by_browser, timeout=LONG)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, page)
        logs = spool("logs", "targetworker", "--tail", "5", environment=own_ray.environment)
        assert (logs.code, "INFO spool.deploy.ray_app.worker: " in logs.out) == (0, True), logs.err + logs.out
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(2 * LONG) == 0, rest
    assert spool("status", environment=own_ray.environment).code == 1
    assert not (Path(own_ray.environment["HOME"]) / ".ray").exists()


def documented_programs(own: OwnRay) -> dict[str, list[str]]:
    """What README.md and docs/clients.md say to try, against the ports of a test."""
    section = (ROOT / "README.md").read_text().partition("## Run it\n")[2].partition("\n## ")[0]
    section += (ROOT / "docs" / "clients.md").read_text().partition("\n## Frameworks")[0]
    section = section.replace("http://127.0.0.1:8000", own.url).replace("127.0.0.1:8001", own.grpc_address)
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", section, re.MULTILINE)
    texts = [textwrap.dedent(block).strip() for block in blocks]
    programs = {text.split()[0]: ["bash", "-c", text] for text in texts if text.startswith("curl ")}
    programs |= {text.split()[1]: [sys.executable, "-c", text] for text in texts if "import " in text}
    assert sorted(programs) == ["curl", "openai", "spool.client"]
    return programs


def test_the_demo_detached(own_ray: OwnRay) -> None:
    environment = own_ray.environment
    ended = spool("serve", "--detach", *own_ray.options, environment=environment)
    assert ended.code == 0, ended.err
    assert "curl http" in ended.err
    curl = next(line for line in ended.err.splitlines() if "curl " in line)
    answer = subprocess.run(shlex.split(curl[curl.index("curl ") :]), capture_output=True, text=True, check=True)
    assert "Paris" in json.loads(answer.stdout)["choices"][0]["message"]["content"]
    shown = spool("status", "--json", environment=environment)
    assert shown.code == 0, shown.err
    names = ("Gateway", "Scheduler", "TargetWorker")
    replicas = {name: one["replicas"] for name, one in shown.summary["deployments"].items()}
    assert replicas == {name: {"RUNNING": 1} for name in names}
    assert shown.summary["cells"][0]["throughput"]["finished"] == 1
    for name, program in documented_programs(own_ray).items():
        outcome = subprocess.run(program, capture_output=True, text=True, check=False)
        assert outcome.returncode == 0, outcome.stderr
        assert "Paris" in outcome.stdout, f"{name}: {outcome.stdout}"
    chatted = spool("chat", "--temperature", "0", given="Name the capital of France.\n", environment=environment)
    assert "Paris" in chatted.out
    assert spool("down", environment=environment).code == 0
    assert spool("status", environment=environment).code == 1
    assert spool("down", environment=environment).code == 0


def test_a_ray_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says so of itself, as the head of a cluster does."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER_RAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        address = other.stdout.readline().strip()
        ended = spool("serve", "--set", f"ray.address={address}", environment={"SPOOL_STATE": str(tmp_path)})
        other.communicate()
    assert (ended.code, ended.err.count("\n")) == (1, 1), ended.err
    for part in (f"spool: Ray at {address} cannot be joined: ", "Ray: 2.0.0 ", "install the cluster's versions here"):
        assert part in ended.err
