"""How many GPUs each worker replica reserves, where the configuration leaves that open."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import ray

from spool.deploy.config.spool_config import SpoolConfig
from spool.scheduler.messages import Role

logger = logging.getLogger(__name__)


def on_gpus_of_ray(config: SpoolConfig) -> SpoolConfig:
    """With draft workers where nothing says how to draft and Ray has GPUs for them."""
    return config.on_gpus(_gpus_of_ray())


def gpus_per_replica(config: SpoolConfig) -> Mapping[Role, float]:
    """The configured number; otherwise one for each rank of each replica as far as Ray's GPUs go, targets first.

    Groups that do not get one for each of their replicas compute on the CPU, except where the device is `cuda`. The one
    GPU that Ray has is shared by a target and a draft, if there are no more replicas.
    """
    if _pair_on_one_gpu(config):
        logger.warning("Ray has one GPU: the target and the draft share it, and its memory")
        return dict.fromkeys(config.roles, 0.5)
    gpus: dict[Role, float] = {}
    left: float | None = None
    for role in config.roles:
        group = config.group(role)
        if config.models.device == "cpu":
            gpus[role] = 0.0
        elif group.num_gpus is not None:
            gpus[role] = group.num_gpus
        elif config.models.device == "cuda":
            gpus[role] = float(config.engine.ranks(role))
        else:
            if left is None:
                left = _gpus_of_ray() - sum(_asked_for(config, other) for other in config.roles)
            wanted, replicas = float(config.engine.ranks(role)), config.groups.cells * group.most
            gpus[role] = wanted if wanted * replicas <= left else 0.0
            left -= gpus[role] * replicas
    if left is not None and 0.0 in gpus.values() and any(gpus.values()):
        names = ", ".join(role.value for role, count in gpus.items() if count == 0)
        logger.warning("Ray has too few GPUs: %s workers compute on the CPU (see groups.*.num_gpus)", names)
    return gpus


def _pair_on_one_gpu(config: SpoolConfig) -> bool:
    unset = all(config.group(role).num_gpus is None for role in config.roles)
    one_rank = config.engine.tensor_parallel_size == 1
    return config.is_one_pair and unset and one_rank and config.models.device != "cpu" and _gpus_of_ray() == 1


def _asked_for(config: SpoolConfig, role: Role) -> float:
    group = config.group(role)
    replicas = config.groups.cells * group.most
    return (group.num_gpus or 0.0) * replicas


def _gpus_of_ray() -> float:
    return float(ray.cluster_resources().get("GPU", 0.0)) if ray.is_initialized() else 0.0
