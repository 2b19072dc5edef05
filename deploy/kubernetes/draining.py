"""Before a pod ends: Ray drains its node, so Serve's replicas there have the time to hand over."""

from __future__ import annotations

import time
from collections.abc import Callable

from spool.deploy.cluster.client import connected
from spool.deploy.errors import RunError, UsageError

_REPLICA = "SERVE_REPLICA::"
_LOOK_SECONDS = 0.5


def drain_node(address: str, node: str | None, seconds: float, tell: Callable[[str], None]) -> None:
    """Returns when no replica is left on a node (None: this one); `seconds` from now it is lost to Ray.

    On Ray's head, which cannot be drained, it waits until no other node has replicas: there is a cell to end first.
    Raises UsageError for a node that Ray does not have, RunError where Ray cannot be joined, or replicas are left at
    the end of the time.
    """
    end = time.monotonic() + seconds
    with connected(address, own=None):
        import ray

        node = node or ray.get_runtime_context().get_node_id()
        if _is_head(node):
            tell("the head stays until the replicas on other nodes have gone")
            left = _wait(lambda: _replicas(None), end)
        else:
            _announce(address, node, seconds)
            tell(f"node {node} drains, {seconds:g} s at most")
            left = _wait(lambda: _replicas(node), end)
    if left:
        raise RunError(f"not gone within {seconds:g} s: {', '.join(left)}")
    tell("no replica is left")


def _announce(address: str, node: str, seconds: float) -> None:
    """As `ray drain-node` does; preemption is the reason that Ray never refuses."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # made by Cython
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    deadline = time.time_ns() // 1_000_000 + int(seconds * 1000)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = GcsClient(address=address).drain_node(node, reason, "the pod ends", deadline)
    if not accepted:
        raise RunError(f"Ray does not drain node {node}: {why}")


def _is_head(node: str) -> bool:
    import ray

    alive = {one["NodeID"]: one["Resources"] for one in ray.nodes() if one["Alive"]}
    if node not in alive:
        raise UsageError(f"--node is {node}, must be one that Ray has: {', '.join(alive)}")
    return "node:__internal_head__" in alive[node]


def _replicas(node: str | None) -> list[str]:
    """Names of Serve's live replicas on a node; None: on any."""
    from ray._private.state import actors

    return [
        actor["Name"].removeprefix(_REPLICA)
        for actor in actors().values()
        if actor["Name"].startswith(_REPLICA)
        and actor["State"] in ("ALIVE", "RESTARTING")
        and node in (None, actor["Address"]["NodeID"])
    ]


def _wait(left: Callable[[], list[str]], end: float) -> list[str]:
    """What is left when nothing is, or at the end."""
    while (names := left()) and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
    return names
