"""What the pods of each worker group of a RayCluster must offer so that one replica fits each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from spool.deploy.config.placement import Placement, WorkerGroup
from spool.deploy.config.problems import ConfigurationError, Problem
from spool.deploy.config.spool_config import SpoolConfig
from spool.scheduler.messages import Role

GATEWAY_GROUP = "gateway"

_READ_BY_MANY = "whoever may read manifests would read it"

# A pod has more time than its replica has for draining: for Ray and Serve to take notice, and for processes to end.
_NOTICE_SECONDS = 15
END_SECONDS = 15


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods of one group. `resources` are Ray's custom ones, `weights` what they load before Ray starts."""

    group: str
    replicas: int
    fewest: int
    most: int
    cpus: int
    gpus: int
    resources: dict[str, int]
    weights: tuple[str, ...]
    drain_seconds: int

    @property
    def notice_seconds(self) -> int:
        """From the word that the pod is to go to the moment when its replica must have ended."""
        return self.drain_seconds + _NOTICE_SECONDS

    @property
    def grace_seconds(self) -> int:
        """From that word to the end of the pod, whatever still runs in it."""
        return self.notice_seconds + END_SECONDS


def pods_of(config: SpoolConfig) -> tuple[Pods, ...]:
    """Gateways (and among them the schedulers), targets, drafts, in this order; a group without replicas has no pods.

    Raises ConfigurationError with everything in the configuration that cannot be on Kubernetes.
    """
    problems = [Problem("", path, message) for path, message in _problems(config)]
    if problems:
        raise ConfigurationError(problems)
    return (_gateways(config), _workers(config, Role.TARGET), _workers(config, Role.DRAFT))


def _gateways(config: SpoolConfig) -> Pods:
    gateway, scheduler = config.gateway, config.scheduler
    schedulers = math.ceil(config.groups.cells / gateway.fewest)
    return Pods(
        group=GATEWAY_GROUP,
        replicas=gateway.replicas,
        fewest=gateway.fewest,
        most=gateway.most,
        cpus=math.ceil(gateway.num_cpus + schedulers * scheduler.num_cpus),
        gpus=0,
        resources=_whole(gateway) | _whole(scheduler),
        weights=(),
        drain_seconds=math.ceil(gateway.leave_seconds),
    )


def _workers(config: SpoolConfig, role: Role) -> Pods:
    group = config.group(role)
    cells = config.groups.cells if role in config.roles else 0
    loads = (role, Role.DRAFT) if config.drafts_inside else (role,)
    weights = {config.model(one): None for one in loads if cells}
    return Pods(
        group=role.value,
        replicas=cells * group.replicas,
        fewest=cells * group.fewest,
        most=cells * group.most,
        cpus=max(1, math.ceil(group.num_cpus)),
        gpus=math.ceil(group.num_gpus or 0),
        resources=_whole(group),
        weights=tuple(weights),
        drain_seconds=math.ceil(group.drain_seconds),
    )


def _whole(placement: Placement) -> dict[str, int]:
    return {name: math.ceil(amount) for name, amount in placement.resources.items()}


def _problems(config: SpoolConfig) -> Iterator[tuple[str, str]]:
    gateway = config.gateway
    if gateway.listens_on_loopback:
        yield "gateway.host", f"is {gateway.host!r}, must be 0.0.0.0 or :: to be reached from outside its pod"
    if config.ray.address is not None:
        yield "ray.address", f"is {config.ray.address!r}, must be unset: KubeRay says where Ray is"
    for field in config.secret_fields:
        yield field, f"is given, must be unset: {_READ_BY_MANY}, so name a variable (`_env`) or a file (`_file`)"
    if not config.internal.chosen:
        yield "internal", "names neither a token nor TLS, must: an update would replace every replica for a new token"
    yield from _placement_problems(config)
    for role in config.roles:
        yield from _worker_problems(config, role, config.group(role))


def _placement_problems(config: SpoolConfig) -> Iterator[tuple[str, str]]:
    """Each kind of replica needs a resource that only its own pods have: that is what puts it there, one to a pod."""
    owners: dict[str, str] = {}
    placements: dict[str, Placement] = {"gateway": config.gateway, "scheduler": config.scheduler}
    placements |= {f"groups.{role.value}": config.group(role) for role in config.roles}
    for path, placement in placements.items():
        field = f"{path}.resources"
        if not placement.resources:
            yield field, f"is empty, must reserve a resource of its own such as `spool_{path.rpartition('.')[2]}: 1`"
        for name, amount in placement.resources.items():
            if name in owners:
                yield f"{field}.{name}", f"is reserved by {owners[name]} too, must be another"
            if not amount.is_integer():
                yield f"{field}.{name}", f"is {amount:g}, must be whole: a pod holds one replica"
            owners[name] = path


def _worker_problems(config: SpoolConfig, role: Role, group: WorkerGroup) -> Iterator[tuple[str, str]]:
    path = f"groups.{role.value}"
    if group.num_cpus < 1:
        yield f"{path}.num_cpus", f"is {group.num_cpus:g}, must be at least 1: they are the CPUs of its pod"
    if group.num_gpus is None and config.models.device != "cpu":
        yield f"{path}.num_gpus", "is unset, must be said unless models.device is cpu: pods get GPUs before Ray starts"
