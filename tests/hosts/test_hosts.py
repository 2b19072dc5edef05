"""A cell on five hosts, placed by resources as in the manifests, while hosts and links fail: no stream is lost, and
every one ends with its text."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
import yaml

from bench.chaos.application import DRAFT, SCHEDULER, TARGET, Application, LoadReport, Watcher, watching
from bench.chaos.pauses import Window, pauses
from bench.chaos.streams import Answer, Case, ConstantLoad, cases, faults_of, streaming
from spool.protos import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from spool.services.rpc.channel_security import ChannelSecurity
from spool.services.rpc.protocol_version import SPOKEN
from tests.hosts.hosts import MACHINE, Host, Network, missing
from tests.k8s.manifests import K8S
from tests.support.certificates import issue
from tests.support.command_line import spool
from tests.support.serving import ENGINE, PACED, PlainDecoder, oracle
from tests.support.waiting import LONG, wait_until

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(1800)]

MODEL, KEY = "tiny", "a-key-of-this-test"
HTTP_PORT, GRPC_PORT, RAY_PORT, DASHBOARD_PORT, REDIS_PORT = 8000, 8001, 6379, 8265, 6380
STREAMS = 16
TOKENS = 200
CUT_SECONDS = 20.0
PATIENCE = 4 * LONG
PLACES: dict[str, dict[str, float]] = {
    "head": {},
    "gateway": {"spool_gateway": 1},
    "draft": {"spool_draft": 1},
    "target-1": {"spool_target": 1, "spool_scheduler": 1},
    "target-2": {"spool_target": 1, "spool_scheduler": 1},
}
COUNTS = {"target": 2, "draft": 1}


@dataclass(frozen=True)
class Cell:
    hosts: dict[str, Host]
    network: Network
    application: Application
    security: ChannelSecurity
    asked: list[Case]
    expected: dict[Case, Answer]

    def host_of(self, deployment: str) -> Host:
        """The first host on which there is a replica of it."""
        name = f"ServeReplica:spool:{deployment}"
        return next(host for host in self.hosts.values() if host.processes(name))

    def has_scheduler(self, host: Host) -> bool:
        return bool(host.processes(f"ServeReplica:spool:{SCHEDULER}"))

    def schedulers(self) -> int:
        """Processes of schedulers on all hosts."""
        return sum(len(host.processes(f"ServeReplica:spool:{SCHEDULER}")) for host in self.hosts.values())

    async def proposed_tokens(self) -> int:
        """Of draft workers, since the start of the scheduler."""
        (host,) = [host for host in self.hosts.values() if self.has_scheduler(host)]
        for at in host.listening(f"ServeReplica:spool:{SCHEDULER}"):
            async with self.security.open_channel(at) as channel:
                with suppress(grpc.aio.AioRpcError):
                    stub = scheduler_pb2_grpc.SchedulerStub(channel)
                    status = await stub.Status(scheduler_pb2.StatusRequest(), timeout=10)
                    return int(status.speculation.draft_tokens)
        return 0


def ray_command(name: str, resources: dict[str, float], password: str) -> list[str]:
    ray = str(Path(sys.executable).with_name("ray"))
    common = [ray, "start", "--block", "--node-ip-address=ADDRESS", f"--object-store-memory={100 << 20}"]
    if name == "head":
        at = [f"--port={RAY_PORT}", "--dashboard-host=0.0.0.0", f"--dashboard-port={DASHBOARD_PORT}"]
        return [*common, "--head", "--num-cpus=0", f"--redis-password={password}", *at]
    offered = ", ".join(f'"{resource}": {amount}' for resource, amount in resources.items())
    return [*common, f"--address={address(0)}:{RAY_PORT}", "--num-cpus=4", f"--resources={{{offered}}}"]


def address(place: int) -> str:
    return f"10.77.0.{place + 2}"


@pytest.fixture(scope="module")
def cell(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    lacking = missing() or ("" if shutil.which("redis-server") else "redis-server not installed")
    if lacking:
        pytest.skip(f"no network namespaces: {lacking}")
    folder = tmp_path_factory.mktemp("hosts")
    target, draft = tiny_pair
    addresses = [address(place) for place in range(len(PLACES))]
    security = issue(folder / "tls", MACHINE, *addresses)
    token, password = secrets.token_hex(32), secrets.token_hex(16)
    environment = {
        **yaml.safe_load((K8S / "base" / "environment.yaml").read_text())["data"],
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        # As KubeRay sets it where the state is in Redis.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        "RAY_REDIS_ADDRESS": f"{MACHINE}:{REDIS_PORT}",
        "SPOOL_API_KEYS": KEY,
    }
    for name in ("HF_HOME", "SPOOL_CACHE", "SPOOL_STATE"):
        del environment[name]
    hosts = {
        name: Host(
            name,
            place + 2,
            folder,
            ray_command(name, resources, password),
            environment,
            # As KubeRay has workers wait for the head.
            after=None if name == "head" else (address(0), DASHBOARD_PORT),
        )
        for place, (name, resources) in enumerate(PLACES.items())
    }
    configuration = {
        "models": {
            "target": str(target),
            "draft": str(draft),
            "draft_ahead": "always",
            "served_model_name": MODEL,
            "dtype": "float32",
        },
        "engine": ENGINE,
        "scheduling": {"batch_size": 8, "policy": "ragged"},
        "groups": {
            "target": {**PACED, "replicas": 2, "drain_seconds": 10, "resources": {"spool_target": 1}},
            "draft": {**PACED, "drain_seconds": 10, "resources": {"spool_draft": 1}},
        },
        "scheduler": {"resources": {"spool_scheduler": 1}},
        "gateway": {"host": "0.0.0.0", "port": HTTP_PORT, "grpc_port": GRPC_PORT, "resources": {"spool_gateway": 1}},
        "auth": {"api_keys_env": "SPOOL_API_KEYS"},
        "internal": {
            "tls": {"ca": security.ca_file, "certificate": security.certificate_file, "key": security.key_file}
        },
    }
    (folder / "spool.yaml").write_text(yaml.safe_dump(configuration))
    rendered = spool("config", "render", folder / "spool.yaml")
    assert rendered.code == 0, rendered.err
    (folder / "serve.yaml").write_text(rendered.out)
    gateway = hosts["gateway"].address
    application = Application(f"http://{gateway}:{HTTP_PORT}", f"{gateway}:{GRPC_PORT}", MODEL, 0, {}, KEY)
    asked = cases(STREAMS, TOKENS)
    expected = oracle(PlainDecoder(target), asked)
    redis = ["redis-server", "--port", str(REDIS_PORT), "--bind", MACHINE, "--requirepass", password, "--save", ""]
    network = Network(list(hosts.values()))
    with network.running(), subprocess.Popen(redis, stdout=subprocess.DEVNULL) as state:
        try:
            for host in hosts.values():
                host.start()
            wait_until(lambda: deployed(folder / "serve.yaml", token), "Ray takes the application", PATIENCE, pause=3.0)
            found = Cell(hosts, network, application, security, asked, expected)
            asyncio.run(first_whole(found))
            yield found
        finally:
            state.kill()


def deployed(file: Path, token: str) -> bool:
    """Whether `serve deploy`, as from a machine beside the cluster, was taken."""
    serve = str(Path(sys.executable).with_name("serve"))
    command = [serve, "deploy", str(file), "--address", f"http://{address(0)}:{DASHBOARD_PORT}"]
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "PATH": str(Path(sys.executable).parent)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return ended.returncode == 0


async def first_whole(cell: Cell) -> None:
    async with watching(cell.application) as watcher:
        await watcher.until(is_whole, "all workers in use", PATIENCE)


def is_whole(report: LoadReport) -> bool:
    return all(len(report.workers[role]) == count for role, count in COUNTS.items())


def through(cell: Cell, name: str, fault: Callable[[Watcher, ConstantLoad], Awaitable[None]]) -> None:
    """Sixteen streams, over HTTP and gRPC, all the time: before the fault, during it, and until all workers are in use
    and all streams go on again. None is lost, and each has the text of plain decoding."""

    async def run() -> tuple[ConstantLoad, Window]:
        async with (
            streaming(cell.application) as client,
            watching(cell.application) as watcher,
            ConstantLoad(client, cell.asked, STREAMS) as load,
        ):
            await whole_again(watcher, load)
            begin = time.monotonic()
            await fault(watcher, load)
            await whole_again(watcher, load)
            return load, Window(begin, time.monotonic())

    load, window = asyncio.run(asyncio.wait_for(run(), 2 * PATIENCE))
    seconds = {what: value for what, value in pauses(load.records, window).items() if value is not None}
    figures = ", ".join(f"{what} {value:.1f} s" for what, value in seconds.items())
    print(f"\n{name}: {len(load.records)} streams, {figures}")
    assert faults_of(load.records, cell.expected) == []
    assert [record for record in load.records if record.refused] == []


async def whole_again(watcher: Watcher, load: ConstantLoad) -> None:
    since = time.monotonic()
    await watcher.until(
        lambda report: is_whole(report) and len(report.busy_targets) == COUNTS["target"] and load.all_went_on(since),
        "all workers in use, and all streams go on",
        PATIENCE,
    )


async def cut_for_a_while(cell: Cell, host: Host, to: bool = True, back: bool = True) -> None:
    with cell.network.disturbed(host, lost_to=float(to), lost_from=float(back)):
        await asyncio.sleep(CUT_SECONDS)


def victim(cell: Cell, deployment: str) -> Host:
    """A host with a target alone, or the one with the draft, the scheduler or the gateway."""
    targets = [host for name, host in cell.hosts.items() if name.startswith("target")]
    alone = next(host for host in targets if not cell.has_scheduler(host))
    return alone if deployment == TARGET else cell.host_of(deployment)


@pytest.mark.parametrize(("to", "back"), [(True, False), (False, True)], ids=["nothing-reaches-it", "nothing-comes"])
def test_a_drafts_host_is_cut_off_one_way(cell: Cell, to: bool, back: bool) -> None:
    host = victim(cell, DRAFT)
    name = f"nothing {'reaches' if to else 'comes from'} {host.name} ({DRAFT}) for 20 s"
    through(cell, name, lambda *_: cut_for_a_while(cell, host, to, back))
    assert asyncio.run(cell.proposed_tokens()) > 0


@pytest.mark.parametrize("deployment", [TARGET, SCHEDULER, "Gateway"])
def test_a_host_loses_its_link_and_comes_back(cell: Cell, deployment: str) -> None:
    host = victim(cell, deployment)
    through(cell, f"link of {host.name} ({deployment}) lost for 20 s", lambda *_: cut_for_a_while(cell, host))
    wait_until(lambda: cell.schedulers() == 1, "one scheduler alone")


@pytest.mark.parametrize("deployment", [DRAFT, TARGET, SCHEDULER])
def test_a_host_dies_and_another_takes_its_place(cell: Cell, deployment: str) -> None:
    host = victim(cell, deployment)

    async def die(watcher: Watcher, load: ConstantLoad) -> None:
        # Without a last packet, as when the power fails.
        with cell.network.disturbed(host, lost_to=1.0, lost_from=1.0):
            await asyncio.to_thread(host.kill)
        await watcher.until(lambda report: not is_whole(report), "the loss is noticed", PATIENCE)
        await asyncio.to_thread(host.start)

    through(cell, f"{host.name} ({deployment}) died", die)


def test_slow_and_lossy_links(cell: Cell) -> None:
    async def wait_for_streams(watcher: Watcher, load: ConstantLoad) -> None:
        # A packet from one host to another passes two links.
        with cell.network.disturbed(*cell.hosts.values(), delay=0.01, lost_to=0.005, lost_from=0.005):
            enough = len(load.records) + STREAMS
            await watcher.until(lambda _: len(load.records) >= enough, "sixteen streams end", PATIENCE)

    through(cell, "20 ms and 1 % loss between all hosts", wait_for_streams)


def test_the_head_dies_and_comes_back(cell: Cell) -> None:
    head = cell.hosts["head"]

    async def die(watcher: Watcher, load: ConstantLoad) -> None:
        with cell.network.disturbed(head, lost_to=1.0, lost_from=1.0):
            await asyncio.to_thread(head.kill)
        await asyncio.sleep(CUT_SECONDS)
        await asyncio.to_thread(head.start)

    through(cell, "the head died, and came back after 20 s", die)
    # Ray is well again: it replaces what is lost from now on.
    target = cell.hosts["target-2"]

    async def lose_worker(watcher: Watcher, load: ConstantLoad) -> None:
        target.processes(f"ServeReplica:spool:{TARGET}")[0].kill()
        await watcher.until(lambda report: len(report.workers["target"]) < 2, "the loss is noticed", PATIENCE)

    through(cell, "a target was killed after the head's return", lose_worker)


def test_the_manifests_probes_are_answered(cell: Cell) -> None:
    """As a kubelet asks, which has no token."""
    service = yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]
    (container,) = service["headGroupSpec"]["template"]["spec"]["containers"]
    raylet = container["livenessProbe"]["httpGet"]
    for host in cell.hosts.values():
        assert httpx.get(f"http://{host.address}:{raylet['port']}{raylet['path']}", timeout=LONG).is_success
    (gateway,) = [group for group in service["workerGroupSpecs"] if group["groupName"] == "gateway"]
    (container,) = gateway["template"]["spec"]["containers"]
    assert httpx.get(cell.application.url + container["readinessProbe"]["httpGet"]["path"], timeout=LONG).is_success


def test_strangers_get_nothing(cell: Cell) -> None:
    """In plain text, or without a certificate of the cell's authority."""

    async def ask(at: str, security: ChannelSecurity) -> tuple[bool, bool]:
        """Whether what listens there answers as a scheduler, and as a worker."""
        answered = []
        async with security.open_channel(at) as channel:
            for call, request in (
                (scheduler_pb2_grpc.SchedulerStub(channel).Status, scheduler_pb2.StatusRequest()),
                (
                    worker_pb2_grpc.WorkerStub(channel).Describe,
                    worker_pb2.DescribeRequest(protocol_version=SPOKEN.newest),
                ),
            ):
                try:
                    await call(request, timeout=10)
                    answered.append(True)
                except grpc.aio.AioRpcError:
                    answered.append(False)
        return answered[0], answered[1]

    services = [f"ServeReplica:spool:{deployment}" for deployment in (SCHEDULER, TARGET, DRAFT)]
    listening = [at for host in cell.hosts.values() for name in services for at in host.listening(name)]
    other = issue(Path(cell.security.ca_file).parent / "other", MACHINE)

    async def all_of(security: ChannelSecurity) -> list[tuple[bool, bool]]:
        return [await ask(at, security) for at in listening]

    friends = asyncio.run(all_of(cell.security))
    assert sorted(friends, reverse=True)[:4] == [(True, False), (False, True), (False, True), (False, True)]
    for stranger in (ChannelSecurity(), ChannelSecurity(token="0" * 32), other):
        assert set(asyncio.run(all_of(stranger))) == {(False, False)}
