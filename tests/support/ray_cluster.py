"""A Ray cluster of several logical nodes in a process of its own, away from the user's home and from other Rays.

`python -m tests.support.ray_cluster '[{}, {"large_gpu": 1}]'` starts it with these custom resources, prints its
address, answers the lines `actors`, `scheduler`, `metrics`, `deploy FILE`, `add_nodes RESOURCES`, `clear`, `kill_gcs`
and `start_gcs` on its standard input, and stops it at its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import yaml

from tests.support.ports import free_ports
from tests.support.waiting import LONG

CPUS_OF_A_NODE = 4
# Ray's workers are as important as what else a machine does; by themselves they would come last.
PRIORITY = {"RAY_worker_niceness": "0"}
# Ray's processes end themselves where they have no GCS for a minute, which a busy machine may need to start another.
PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
# Ray gives its own processes 30 s to start, which a busy machine may exceed.
START_ATTEMPTS = 3


def processes_of(folder: str) -> list[psutil.Process]:
    """Those with this folder on their command line, as all of a Ray have that was started there."""
    return [one for one in psutil.process_iter() if folder in " ".join(_command(one))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def end(processes: list[psutil.Process]) -> None:
    """So that what one test leaves is not in the way of others."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, LONG)


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[dict[str, str]]:
    """What Ray needs to know to keep its state in a Redis; nothing where there is none to be had."""
    server = shutil.which("redis-server")
    if server is None:
        yield {}
        return
    (port,) = free_ports(1)
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}"}
        finally:
            process.kill()


class RayCluster:
    """For as long as the `with` block lasts: one logical node for each mapping of custom resources, the head first.

    Each has four CPUs; the head `head_cpus`.
    """

    def __init__(
        self,
        nodes: list[dict[str, float]],
        environment: Mapping[str, str] | None = None,
        head_cpus: int = CPUS_OF_A_NODE,
    ) -> None:
        self._nodes = nodes
        self._head_cpus = head_cpus
        # Not pytest's folder: the paths of sockets must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="spool-"))
        self._token = self.folder / "token"
        self.environment = {
            **os.environ,
            "HOME": str(self.folder),
            "RAY_TMPDIR": str(self.folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
            **PRIORITY,
            **PATIENCE,
            **(environment or {}),
        }
        self.address = ""

    def __enter__(self) -> Self:
        for attempt in range(START_ATTEMPTS):
            try:
                self._start(attempt)
                break
            except AssertionError:
                if attempt == START_ATTEMPTS - 1:
                    raise
        return self

    def _start(self, attempt: int) -> None:
        # In a Redis, what a Ray that did not start has left is not for the next one.
        self.environment["RAY_external_storage_namespace"] = f"attempt-{attempt}"
        self.folder.mkdir(exist_ok=True)
        self._token.write_text("0" * 64)
        self._log = (self.folder / "cluster.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_cluster", json.dumps(self._nodes), str(self._head_cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=self.environment,
            text=True,
        )
        try:
            self.address = self._answer()["address"]
        except BaseException:
            self._end()
            raise

    @property
    def process_id(self) -> int:
        """Of the process that is an ancestor of all others of this Ray."""
        return self._process.pid

    @contextlib.contextmanager
    def further_nodes(self, nodes: list[dict[str, float]]) -> Iterator[Self]:
        """Nodes with these custom resources for the length of the block. At its end they and Serve are gone."""
        assert self._ask(f"add_nodes {json.dumps(nodes)}") == len(nodes)
        try:
            yield self
        finally:
            self._ask("clear")

    def actors(self) -> list[dict[str, Any]]:
        """Class, process, node and state of every actor, from Ray itself; the node by its custom resources."""
        found: list[dict[str, Any]] = self._ask("actors")
        return found

    def scheduler(self) -> dict[str, Any]:
        """What the scheduler of the application `spool` says of itself and its workers."""
        status: dict[str, Any] = self._ask("scheduler")
        return status

    def metrics(self) -> list[str]:
        """Where Ray tells each node's metrics to Prometheus."""
        endpoints: list[str] = self._ask("metrics")
        return endpoints

    def deploy(self, file: Path) -> None:
        """What `serve deploy FILE` has Ray Serve do; answered when Serve has taken notice."""
        assert self._ask(f"deploy {file}") == "taken"

    def kill_gcs(self) -> int:
        """Kills the process that has Ray's state; answered when it is dead, with its id."""
        process_id: int = self._ask("kill_gcs")
        return process_id

    def start_gcs(self) -> int:
        """Starts another one in its place."""
        process_id: int = self._ask("start_gcs")
        return process_id

    def _ask(self, question: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return self._answer()[question.partition(" ")[0]]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(LONG)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        end(processes_of(str(self.folder)))
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the cluster died: {(self.folder / 'cluster.log').read_text()[-2000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer


def deploy(file: Path) -> None:
    """As the dashboard does that `serve deploy` speaks to."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    config = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text()))
    serve.start(proxy_location=config.proxy_location, http_options=config.http_options.model_dump())
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(config)


def clear() -> None:
    """Ends Serve with all that it runs, so that the next suite can start it with other ports."""
    from ray import serve
    from ray.serve.context import _get_global_client

    if _get_global_client(raise_if_no_controller_running=False) is not None:
        serve.shutdown()


def change_gcs(head: Any, change: str) -> int:
    if change == "start_gcs":
        head.start_gcs_server()
    (server,) = head.all_processes["gcs_server"]
    process_id: int = server.process.pid
    if change == "kill_gcs":
        head.kill_gcs_server()
    return process_id


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import ray
    from ray._private.state import actors, state
    from ray.cluster_utils import Cluster

    from deploy.cluster.client import scheduler_status

    def node(resources: dict[str, float]) -> dict[str, Any]:
        return {
            "num_cpus": CPUS_OF_A_NODE,
            "num_gpus": 0,
            "resources": resources,
            "object_store_memory": 80 << 20,
        }

    first, *others = json.loads(sys.argv[1])
    # A GCS that comes back must be found where it was.
    (gcs_port,) = free_ports(1)
    head = {**node(first), "num_cpus": int(sys.argv[2]), "include_dashboard": False, "gcs_server_port": gcs_port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    added: list[Any] = []

    def add(nodes: list[dict[str, float]]) -> list[Any]:
        new = [cluster.add_node(wait=False, **node(resources)) for resources in nodes]
        cluster.wait_for_nodes()
        return new

    add(others)
    ray.init(address=cluster.address, log_to_driver=False)
    print(json.dumps({"address": cluster.address}), file=answers, flush=True)
    for line in sys.stdin:
        question, _, file = line.strip().partition(" ")
        if question == "deploy":
            deploy(Path(file))
            print(json.dumps({"deploy": "taken"}), file=answers, flush=True)
            continue
        if question == "add_nodes":
            added += add(json.loads(file))
            print(json.dumps({"add_nodes": len(added)}), file=answers, flush=True)
            continue
        if question == "clear":
            clear()
            while added:
                cluster.remove_node(added.pop())
            print(json.dumps({"clear": "done"}), file=answers, flush=True)
            continue
        if question in ("kill_gcs", "start_gcs"):
            print(json.dumps({question: change_gcs(cluster.head_node, question)}), file=answers, flush=True)
            continue
        if question == "scheduler":
            print(json.dumps({"scheduler": scheduler_status("spool")}), file=answers, flush=True)
            continue
        if question == "metrics":
            nodes = [node for node in ray.nodes() if node["Alive"]]
            endpoints = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in nodes]
            print(json.dumps({"metrics": endpoints}), file=answers, flush=True)
            continue
        places = {found["NodeID"]: sorted(found["Resources"]) for found in state.node_table()}
        known = [
            {
                "name": actor["Name"],
                "state": actor["State"],
                "process_id": actor["Pid"],
                "node": actor["Address"]["NodeID"],
                "resources": [name for name in places.get(actor["Address"]["NodeID"], ()) if name.endswith("_gpu")],
            }
            for actor in actors().values()
        ]
        print(json.dumps({"actors": known}), file=answers, flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
