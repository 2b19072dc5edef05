"""What replicas of every kind share: the way to the scheduler, their own address, and where Serve listens in them."""

from __future__ import annotations

from typing import Any

import ray.util
from ray.serve._private import replica as serve_replica
from ray.serve.handle import DeploymentHandle

from spool.deploy.config.ingress import InternalSettings


class SchedulerAddress:
    """Asks Serve for the address of the current scheduler. Each call asks again: a successor has another address."""

    def __init__(self, scheduler: DeploymentHandle) -> None:
        self._scheduler = scheduler

    async def __call__(self) -> str:
        """Raises ConnectionError while no scheduler is running."""
        try:
            address: str = await self._scheduler.locate.remote()
        except Exception as error:  # Serve's and Ray's errors have no common ancestor
            raise ConnectionError(f"no scheduler found: {type(error).__name__}: {error}") from error
        return address


def internal_host(settings: InternalSettings) -> str:
    """The address of this node that other replicas reach."""
    if settings.host is not None:
        return settings.host
    found: str = ray.util.get_node_ip_address()
    return found


def keep_serve_on_node() -> None:
    """Called in a replica's constructor: the port on which Serve itself takes calls for the replica is then opened on
    the node's address, as all other ports of Ray are. Serve would open it on every interface, and has no setting."""
    host = ray.util.get_node_ip_address()
    # Serve binds the port after the constructor.
    bind = serve_replica.add_port_to_grpc_server

    def bind_on_node(server: Any, address: str) -> int:
        port: int = bind(server, f"{f'[{host}]' if ':' in host else host}:{address.rpartition(':')[2]}")
        return port

    serve_replica.add_port_to_grpc_server = bind_on_node
