"""What replicas of every kind share: the way to the scheduler, and their own address."""

from __future__ import annotations

import ray.util
from ray.serve.handle import DeploymentHandle

from deploy.config.ingress import InternalSettings


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
