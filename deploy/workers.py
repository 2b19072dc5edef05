"""The worker processes of one machine: their devices, engines and memory."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path

from deploy.errors import RunError, UsageError
from deploy.options import NGRAM
from engine.errors import GpuMemoryError
from engine.models.fetching import fetch_model
from engine.models.memory_plan import GPU_CODE_DTYPES, ModelMemory, model_memory
from engine.models.source import resolve_model
from engine.settings import DTYPES, EngineSettings
from scheduler.messages import Role
from services.launch.launcher import WorkerLaunch

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"

EngineOf = Callable[[Role, str], EngineSettings | None]
"""The engine of a worker by role and device; None for prompt lookup, which has no model."""


def plan_workers(
    roles: Sequence[Role], device: str, engine_of: EngineOf, gpu_roles: Collection[Role] = tuple(Role)
) -> list[WorkerLaunch]:
    """A launch for each of `roles`; the first of them get the first GPUs. Raises `UsageError` and `RunError`."""
    on_cpu = {role: engine_of(role, "cpu") for role in set(roles)}
    ranks = {
        number: engine.tensor_parallel_size
        for number, role in enumerate(roles)
        if role in gpu_roles and (engine := on_cpu[role]) is not None
    }
    devices = dict(zip(ranks, worker_devices(device, list(ranks.values())), strict=True))
    launches = []
    for number, role in enumerate(roles):
        place = devices.get(number, "cpu")
        engine = engine_of(role, place)
        if engine is None:
            launches.append(WorkerLaunch(role, {"model": NGRAM}, threads=1))
            continue
        if place != "cpu":
            others = [roles[other] for other, shared in devices.items() if shared == place and other != number]
            peers = [(other, peer) for other in others if (peer := engine_of(other, place)) is not None]
            engine = replace(engine, gpu_peers=tuple(worker_memory(peer, other) for other, peer in peers))
        launches.append(WorkerLaunch(role, asdict(engine), threads=engine.threads or 0))
    return launches


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

    `auto` means the GPUs if the machine has any, `cuda` all GPUs.

    Raises `UsageError` for a name that is no device or a GPU that is not there, and for workers of several ranks with
    fewer GPUs than ranks.
    """
    if not _DEVICE.fullmatch(device):
        raise UsageError(f"device is {device!r}, must be auto, cpu, cuda or cuda:N")
    gpus = 0 if device == "cpu" else count_gpus(device)
    if device == "cpu" or (device == "auto" and gpus == 0):
        return ["cpu"] * len(ranks)
    if gpus == 0:
        raise UsageError(f"device is {device!r}, but this machine has no GPU that torch can use")
    if device.startswith("cuda:"):
        if int(device[5:]) >= gpus:
            raise UsageError(f"device is {device!r}, but this machine has {gpus} GPUs, the last is cuda:{gpus - 1}")
        return [device] * len(ranks)
    if max(ranks) > 1 and sum(ranks) > gpus:
        raise UsageError(
            f"tensor_parallel_size is {max(ranks)}, so that all workers together have {sum(ranks)} GPUs: this machine "
            f"has {gpus}"
        )
    return [f"cuda:{first % gpus}" for first in accumulate(ranks[:-1], initial=0)]


def count_gpus(device: str) -> int:
    """GPUs that torch can use. Asking torch takes seconds, so `auto` first looks whether the system has any."""
    if device == "auto" and not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0
    outcome = subprocess.run([sys.executable, "-P", "-c", _COUNT_GPUS], capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        raise RunError(f"torch does not load: {outcome.stderr.strip().rsplit(chr(10), 1)[-1]}")
    return int(outcome.stdout)
