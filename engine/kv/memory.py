"""How many bytes the KV of a worker gets."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from spool.engine.errors import GpuMemoryError
from spool.engine.models.memory_plan import model_memory, plan_memory
from spool.engine.settings import EngineSettings
from spool.scheduler.messages import Role

logger = logging.getLogger(__name__)

# Without a setting: the share of a CPU's free memory that KV may take, and a cap, for it is shared with everything else
# that runs.
_CPU_KV_SHARE = 0.2
_CPU_KV_BYTES = 4 << 30


def planned_kv_bytes(settings: EngineSettings, role: Role, folder: Path, device: torch.device) -> int | None:
    """What the plan of a GPU's memory gives to the KV of this worker; None where settings do, and on a CPU."""
    if device.type != "cuda" or settings.kv_pages or settings.kv_memory_bytes:
        return None
    ranks = settings.tensor_parallel_size
    rows, quantization = settings.batched_tokens, settings.quantization
    own = model_memory(
        role.value, folder, settings.dtype, rows, ranks, quantization, quantized_kv=settings.quantized_kv
    )
    here = -(-ranks // torch.cuda.device_count())
    total = torch.cuda.mem_get_info(device)[1]
    return plan_memory(total, settings.gpu_memory_utilization, (*[own] * here, *settings.gpu_peers))[0]


def kv_bytes(settings: EngineSettings, planned: int | None, device: torch.device, head_bytes: int) -> int:
    """`planned`: as `planned_kv_bytes` gives, of which the weights of a drafting head get `head_bytes`."""
    if settings.kv_memory_bytes is not None:
        return settings.kv_memory_bytes
    if planned is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(int(free * _CPU_KV_SHARE), _CPU_KV_BYTES)
    torch.cuda.empty_cache()
    planned -= head_bytes
    free = torch.cuda.mem_get_info(device)[0]
    logger.info("%s: %d MiB are free beside the weights, KV gets %d", device, free >> 20, planned >> 20)
    if planned > free:
        raise GpuMemoryError(
            f"KV is to have {planned >> 20} MiB of {device}, of which {free >> 20} MiB are free: other programs use "
            f"it (gpu_memory_utilization is {settings.gpu_memory_utilization:g})"
        )
    return planned
