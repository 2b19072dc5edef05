"""Which workers a configuration starts on one machine, and on which devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deploy.config.spool_config import SpoolConfig
from deploy.errors import UsageError
from deploy.offline.devices import worker_devices
from deploy.options import NGRAM
from engine.models.memory_plan import ModelMemory, model_memory
from engine.models.source import resolve_model
from scheduler.messages import Role


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One worker; `engine` are the settings of its engine."""

    name: str
    role: Role
    threads: int
    engine: dict[str, Any]


def planned_workers(config: SpoolConfig) -> list[PlannedWorker]:
    """Targets first, so that they get the first GPUs. Raises UsageError for a device that is not there."""
    names = [(role, f"{role.value}-{number}") for role in config.roles for number in range(config.group(role).replicas)]
    on_gpu = [name for role, name in names if config.has_model(role) and config.group(role).num_gpus != 0]
    roles = {name: role for role, name in names}
    ranks = [config.engine.ranks(roles[name]) for name in on_gpu]
    devices = dict(zip(on_gpu, worker_devices(config.models.device, ranks), strict=True))
    planned = []
    for role, name in names:
        if not config.has_model(role):
            planned.append(PlannedWorker(name, role, 1, {"model": NGRAM}))
            continue
        device = devices.get(name, "cpu")
        beside = [other for other in on_gpu if other != name and devices[other] == device != "cpu"]
        peers = tuple(_memory(config, roles[other]) for other in beside)
        threads = config.threads(role)
        planned.append(PlannedWorker(name, role, threads, asdict(config.engine_settings(role, device, threads, peers))))
    return planned


def _memory(config: SpoolConfig, role: Role) -> ModelMemory:
    settings = config.engine_settings(role, "cuda", config.threads(role))
    folder = resolve_model(settings.model, role).folder
    if folder is None:
        raise UsageError(f"{role.value} model {settings.model} is not on this machine")
    return model_memory(
        role.value, folder, settings.dtype, settings.max_num_batched_tokens, settings.tensor_parallel_size
    )
