"""The worker processes of one machine: their devices, engines and memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import accumulate
from pathlib import Path

from spool.deploy.config.spool_config import SpoolConfig
from spool.deploy.errors import RunError, UsageError
from spool.engine.errors import GpuMemoryError
from spool.engine.models.fetching import fetch_model
from spool.engine.models.memory_plan import GPU_CODE_DTYPES, ModelMemory, model_memory
from spool.engine.models.source import resolve_model
from spool.engine.settings import DTYPES, EngineSettings
from spool.scheduler.messages import Role
from spool.services.launch.launcher import WorkerLaunch

EngineOf = Callable[[Role, str], EngineSettings]
"""The engine of a role on a device, without what shares the device or its process."""

_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


def cell_workers(config: SpoolConfig, engine_of: EngineOf | None = None) -> list[WorkerLaunch]:
    """The workers that a configuration starts on this machine, with names; targets first, also on GPUs.

    `engine_of` gives the engine of a role on a device, in place of the configuration. Raises UsageError and RunError.
    """
    if config.models.device != "cpu":
        config = config.on_gpus(count_gpus(config.models.device))
    engine_of = engine_of or config.engine_of
    places = [(role, index) for role in config.roles for index in range(config.group(role).replicas)]
    on_gpus = {
        number: config.engine.ranks(role) for number, (role, _) in enumerate(places) if config.group(role).num_gpus != 0
    }
    devices = dict(zip(on_gpus, worker_devices(config.models.device, list(on_gpus.values())), strict=True))
    launches = []
    for number, (role, index) in enumerate(places):
        name, device = f"{role.value}-{index}", devices.get(number, "cpu")
        others = [places[other][0] for other, shared in devices.items() if shared == device and other != number]
        engine = worker_engine(config, role, device, others, engine_of)
        launches.append(WorkerLaunch(role, asdict(engine), engine.threads, name))
    return launches


def worker_engine(
    config: SpoolConfig, role: Role, device: str, others: Sequence[Role], engine_of: EngineOf
) -> EngineSettings:
    """Of a worker that has its device together with `others`; a target's also holds that of the draft inside it, and
    prompt lookup where no draft worker has that.

    Raises `UsageError`.
    """
    inside = (Role.DRAFT,) if config.drafts_inside else ()
    models = [one for worker in (role, *others) for one in (worker, *(inside if worker is Role.TARGET else ()))]

    def sharing(place: int) -> EngineSettings:
        engine = engine_of(models[place], device)
        if device == "cpu":
            return engine
        peers = [one for number, one in enumerate(models) if number != place]
        return replace(engine, gpu_peers=tuple(worker_memory(engine_of(peer, device), peer) for peer in peers))

    engine = sharing(0)
    if role is (Role.DRAFT if config.drafts_in_workers else Role.TARGET):
        engine = replace(engine, lookup_match=config.models.lookup_match)
    if inside and role is Role.TARGET:
        return replace(engine, inside_draft=replace(sharing(1), threads=engine.threads))
    return engine


def worker_memory(engine: EngineSettings, role: Role) -> ModelMemory:
    """What a worker takes of a GPU, or of a CPU's memory. Fetches its model where it is not there yet.

    Raises `UsageError`.
    """
    folder = fetch_model(resolve_model(engine.model, role), lambda message, fraction: None)
    try:
        return model_memory(
            role.value,
            folder,
            engine.dtype,
            engine.batched_tokens,
            engine.tensor_parallel_size,
            engine.quantization,
            DTYPES if engine.device == "cpu" else GPU_CODE_DTYPES,
            engine.quantized_kv,
        )
    except GpuMemoryError as error:
        raise UsageError(str(error)) from error


def worker_devices(device: str, ranks: Sequence[int]) -> list[str]:
    """The first device of each worker; worker i gets `ranks[i]` consecutive devices.

    `device` is `cpu`, `cuda` for all GPUs, or `auto` for these if the machine has any. Raises `UsageError` where there
    is no GPU, and for workers of several ranks with fewer GPUs than ranks.
    """
    gpus = 0 if device == "cpu" or not ranks else count_gpus(device)
    if not ranks or (gpus == 0 and device != "cuda"):
        return ["cpu"] * len(ranks)
    if gpus == 0:
        raise UsageError(f"device is {device!r}, but this machine has no GPU that torch can use")
    if max(ranks) > 1 and sum(ranks) > gpus:
        raise UsageError(
            f"tensor_parallel_size is {max(ranks)}, so that all workers together have {sum(ranks)} GPUs: this machine "
            f"has {gpus}"
        )
    return [f"cuda:{first % gpus}" for first in accumulate(ranks[:-1], initial=0)]


@cache
def count_gpus(device: str) -> int:
    """GPUs that torch can use. Asking torch takes seconds, so `auto` first looks whether the system has any."""
    if device == "auto" and not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0
    outcome = subprocess.run([sys.executable, "-P", "-c", _COUNT_GPUS], capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        raise RunError(f"torch does not load: {outcome.stderr.strip().rsplit(chr(10), 1)[-1]}")
    return int(outcome.stdout)
