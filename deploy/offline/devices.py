"""Which device each worker computes on."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from deploy.errors import RunError, UsageError

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


def worker_devices(device: str, ranks: Sequence[int]) -> list[str]:
    """The first device of each worker, of which `ranks` says how many each has, one after the other: `auto` is the GPUs
    where there are any, `cuda` all GPUs in turn.

    Raises `UsageError` for a name that is no device or a GPU that is not there, and for workers of several ranks with
    fewer GPUs than ranks.
    """
    if not _DEVICE.fullmatch(device):
        raise UsageError(f"device is {device!r}, must be auto, cpu, cuda or cuda:N")
    # Asking takes seconds, for torch has to load.
    gpus = 0 if device == "cpu" or (device == "auto" and not _may_have_gpus()) else _count_gpus()
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


def _may_have_gpus() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _count_gpus() -> int:
    outcome = subprocess.run([sys.executable, "-P", "-c", _COUNT_GPUS], capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        raise RunError(f"torch does not load: {outcome.stderr.strip().rsplit(chr(10), 1)[-1]}")
    return int(outcome.stdout)
