"""Which device each worker computes on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from deploy.errors import RunError, UsageError

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


def worker_devices(device: str, workers: int) -> list[str]:
    """A device for each of `workers`: `auto` is the GPUs where there are any, `cuda` all GPUs in turn.

    Raises `UsageError` for a name that is no device or a GPU that is not there.
    """
    if not _DEVICE.fullmatch(device):
        raise UsageError(f"device is {device!r}, must be auto, cpu, cuda or cuda:N")
    # Asking takes seconds, for torch has to load.
    gpus = 0 if device == "cpu" or (device == "auto" and not _may_have_gpus()) else _count_gpus()
    if device == "cpu" or (device == "auto" and gpus == 0):
        return ["cpu"] * workers
    if gpus == 0:
        raise UsageError(f"device is {device!r}, but this machine has no GPU that torch can use")
    if device.startswith("cuda:"):
        if int(device[5:]) >= gpus:
            raise UsageError(f"device is {device!r}, but this machine has {gpus} GPUs, the last is cuda:{gpus - 1}")
        return [device] * workers
    return [f"cuda:{worker % gpus}" for worker in range(workers)]


def _may_have_gpus() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _count_gpus() -> int:
    outcome = subprocess.run([sys.executable, "-P", "-c", _COUNT_GPUS], capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        raise RunError(f"torch does not load: {outcome.stderr.strip().rsplit(chr(10), 1)[-1]}")
    return int(outcome.stdout)
