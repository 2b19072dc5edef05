"""A Ray cluster of several logical nodes in a process of its own, away from the user's home and from other Rays.

`python -m tests.support.ray_cluster '[{}, {"large_gpu": 1}]'` starts it with these custom resources, prints its
address, answers the lines `actors`, `cells`, `metrics`, `deploy FILE`, `add_nodes RESOURCES`, `clear`, `kill_gcs`
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


class Answering:
    """A process of a module that answers each line on its standard input by one of JSON."""

    def __init__(self, module: str, *arguments: str, **options: Any) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
        self.process_id = self._process.pid

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self._process.args} died"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, question: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return self.read()[question.partition(" ")[0]]

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(LONG)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


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
        arguments = json.dumps(self._nodes), str(self._head_cpus)
        self._process = Answering("tests.support.ray_cluster", *arguments, stderr=self._log, env=self.environment)
        try:
            self.address = self._process.read()["address"]
        except BaseException as error:
            error.add_note((self.folder / "cluster.log").read_text()[-2000:])
            self._end()
            raise

    @property
    def process_id(self) -> int:
        """Of the process that is an ancestor of all others of this Ray."""
        return self._process.process_id

    @contextlib.contextmanager
    def further_nodes(self, nodes: list[dict[str, float]]) -> Iterator[Self]:
        """Nodes with these custom resources for the length of the block. At its end Serve is gone, and before the next
        block the nodes are too, but for those that it has as well."""
        assert self._process.ask(f"add_nodes {json.dumps(nodes)}") == len(nodes)
        try:
            yield self
        finally:
            self._process.ask("clear")

    def actors(self) -> list[dict[str, Any]]:
        """Class, process, node and state of every actor, from Ray itself; the node by its custom resources."""
        return list(self._process.ask("actors"))

    def scheduler(self) -> dict[str, Any]:
        """What the scheduler of the application `spool` says of itself and its workers."""
        return self.cells()[0]

    def cells(self) -> list[dict[str, Any]]:
        """The same of every cell."""
        return list(self._process.ask("cells"))

    def metrics(self) -> list[str]:
        """Where Ray tells each node's metrics to Prometheus."""
        return list(self._process.ask("metrics"))

    def deploy(self, file: Path) -> None:
        """What `serve deploy FILE` has Ray Serve do; answered when Serve has taken notice."""
        assert self._process.ask(f"deploy {file}") == "taken"

    def kill_gcs(self) -> int:
        """Kills the process that has Ray's state; answered when it is dead, with its id."""
        return int(self._process.ask("kill_gcs"))

    def start_gcs(self) -> int:
        """Starts another one in its place."""
        return int(self._process.ask("start_gcs"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.end()
        end(processes_of(str(self.folder)))
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Cluster:
    """The nodes of a cluster, and a driver that answers what they do not know themselves.

    A driver keeps a processor busy once another GCS has taken over (its poll for errors returns at once then), and may
    not find that GCS at all. So its process ends before the GCS does, and another one follows.
    """

    def __init__(self, first: dict[str, float], others: list[dict[str, float]], head_cpus: int) -> None:
        from ray.cluster_utils import Cluster as RayNodes

        # A GCS that comes back must be found where it was.
        (gcs_port,) = free_ports(1)
        head = {"num_cpus": head_cpus, "include_dashboard": False, "gcs_server_port": gcs_port}
        self._nodes = RayNodes(initialize_head=True, head_node_args={**_node(first), **head})
        self._added: list[tuple[dict[str, float], Any]] = []
        self._idle: list[tuple[dict[str, float], Any]] = []
        """Nodes that the next suite may want as well: starting one takes seconds of a processor."""
        self._add(others)
        self.address: str = self._nodes.address
        self._driver = Answering("tests.support.ray_driver", self.address)

    def answer(self, question: str, argument: str) -> Any:
        match question:
            case "add_nodes":
                self._use(json.loads(argument))
                return len(self._added)
            case "clear":
                self._idle, self._added = self._added, []
                return self._driver.ask("clear")
            case "kill_gcs":
                process_id = self._gcs()
                self._driver.end()
                self._nodes.head_node.kill_gcs_server()
                return process_id
            case "start_gcs":
                self._nodes.head_node.start_gcs_server()
                self._driver = Answering("tests.support.ray_driver", self.address)
                return self._gcs()
            case _:
                return self._driver.ask(f"{question} {argument}".strip())

    def end(self) -> None:
        self._driver.end()
        self._nodes.shutdown()

    def _use(self, wanted: list[dict[str, float]]) -> None:
        """Nodes with these resources: idle ones as far as there are any. The other idle ones are removed."""
        missing = []
        for resources in wanted:
            same = next((idle for idle in self._idle if idle[0] == resources), None)
            if same is None:
                missing.append(resources)
            else:
                self._idle.remove(same)
                self._added.append(same)
        while self._idle:
            self._nodes.remove_node(self._idle.pop()[1])
        self._added += zip(missing, self._add(missing), strict=True)

    def _add(self, nodes: list[dict[str, float]]) -> list[Any]:
        new = [self._nodes.add_node(wait=False, **_node(resources)) for resources in nodes]
        self._nodes.wait_for_nodes()
        return new

    def _gcs(self) -> int:
        (server,) = self._nodes.head_node.all_processes["gcs_server"]
        process_id: int = server.process.pid
        return process_id


def _node(resources: dict[str, float]) -> dict[str, Any]:
    return {"num_cpus": CPUS_OF_A_NODE, "num_gpus": 0, "resources": resources, "object_store_memory": 80 << 20}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    first, *others = json.loads(sys.argv[1])
    cluster = Cluster(first, others, head_cpus=int(sys.argv[2]))
    print(json.dumps({"address": cluster.address}), file=answers, flush=True)
    for line in sys.stdin:
        question, _, argument = line.strip().partition(" ")
        print(json.dumps({question: cluster.answer(question, argument)}), file=answers, flush=True)
    cluster.end()


if __name__ == "__main__":
    main()
