"""What replicas of every kind share: the plan they start from, and the way to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ray.util
from ray.serve.handle import DeploymentHandle

from deploy.config.ingress import InternalSettings
from deploy.config.spool_config import SpoolConfig
from scheduler.messages import Role


@dataclass(frozen=True, slots=True)
class Plan:
    """The configuration, with what only the deployment could settle: GPUs of a replica, by role, and thread counts."""

    config: SpoolConfig
    gpus: Mapping[Role, float]
    threads: Mapping[Role, int]

    @property
    def pair_shares_a_gpu(self) -> bool:
        """Whether a draft and a target are on one GPU, and nothing else of this application."""
        return self.config.is_one_pair and min(self.gpus.values()) > 0 and sum(self.gpus.values()) <= 1

    def device(self, role: Role) -> str:
        """The first device of one worker. Ray shows a replica its own GPUs only, so the first is always the right one,
        and its ranks have one after the other."""
        return "cuda:0" if self.gpus[role] > 0 else "cpu"


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
