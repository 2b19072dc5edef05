"""A Ray cluster of several logical nodes in a process of its own, away from the user's home and from other Rays.

`python -m tests.support.ray_cluster '[{}, {"large_gpu": 1}]'` starts it with these custom resources, prints its
address, answers each line `actors` or `scheduler` on standard input, and stops it at the end of the input.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CPUS_OF_A_NODE = 4


class RayCluster:
    """For as long as the `with` block lasts: one logical node for each mapping of custom resources, the head first."""

    def __init__(self, nodes: list[dict[str, float]]) -> None:
        self._nodes = nodes
        # Not pytest's folder: the paths of sockets must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="spool-"))
        token = self.folder / "token"
        token.write_text("0" * 64)
        self.environment = {
            **os.environ,
            "HOME": str(self.folder),
            "RAY_TMPDIR": str(self.folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.address = ""

    def __enter__(self) -> Self:
        self._log = (self.folder / "cluster.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_cluster", json.dumps(self._nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=self.environment,
            text=True,
        )
        self.address = self._answer()["address"]
        return self

    def actors(self) -> list[dict[str, Any]]:
        """Class, process, node and state of every actor, from Ray itself; the node by its custom resources."""
        found: list[dict[str, Any]] = self._ask("actors")
        return found

    def scheduler(self) -> dict[str, Any]:
        """What the scheduler of the application `spool` says of itself and its workers."""
        status: dict[str, Any] = self._ask("scheduler")
        return status

    def _ask(self, question: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return self._answer()[question]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the cluster died: {(self.folder / 'cluster.log').read_text()[-2000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import ray
    from ray._private.state import actors, state
    from ray.cluster_utils import Cluster

    from deploy.cluster import scheduler_status

    def node(resources: dict[str, float]) -> dict[str, Any]:
        return {
            "num_cpus": CPUS_OF_A_NODE,
            "num_gpus": 0,
            "resources": resources,
            "object_store_memory": 80 << 20,
        }

    first, *others = json.loads(sys.argv[1])
    cluster = Cluster(initialize_head=True, head_node_args={**node(first), "include_dashboard": False})
    for resources in others:
        cluster.add_node(wait=False, **node(resources))
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    print(json.dumps({"address": cluster.address}), file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() == "scheduler":
            print(json.dumps({"scheduler": scheduler_status("spool")}), file=answers, flush=True)
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
