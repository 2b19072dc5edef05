"""The device: what it is, how fast it copies, and how many bytes of weights a pass over a model reads on it."""

from __future__ import annotations

import re
import statistics
import time
from pathlib import Path

import torch
from safetensors import safe_open

from bench.machine import describe_machine

_COPY_BYTES = {"cpu": 64 << 20, "cuda": 4 << 30}
_MEMORY_SHARE = 8
_DEVICE = re.compile(r"cpu|cuda(:(?P<number>\d+))?")
_COPIES = 7
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str) -> None:
    """Raises ValueError for a device that this benchmark does not know or this machine does not have."""
    found = _DEVICE.fullmatch(device)
    if found is None:
        raise ValueError(f"device is {device!r}, must be cpu, cuda or cuda:N")
    # By its text: torch takes the number modulo 256.
    if device != "cpu" and int(found["number"] or 0) >= (gpus := torch.cuda.device_count()):
        raise ValueError(f"device is {device!r}, but torch can use {gpus} GPUs here")


def describe_used(device: str) -> dict[str, object]:
    """The machine, with the one GPU that is used."""
    return describe_machine() | _gpu(torch.device(device))


def copy_bytes_per_second(device: str) -> float:
    """Bytes read and written by a copy within the device's memory; the median of several."""
    kind = torch.device(device)
    count = _COPY_BYTES[kind.type]
    if kind.type == "cuda":
        count = min(count, torch.cuda.mem_get_info(kind)[0] // _MEMORY_SHARE)
    source = torch.ones(count, dtype=torch.uint8, device=kind)
    copy = torch.empty_like(source)
    samples = []
    for _ in range(_COPIES + 1):
        _wait_for(kind)
        started = time.perf_counter()
        copy.copy_(source)
        _wait_for(kind)
        samples.append(time.perf_counter() - started)
    # The first one touches memory that nobody had before.
    return 2 * count / statistics.median(samples[1:])


def weight_bytes_per_pass(folder: Path, dtype: str) -> int:
    """Of a model's weights, loaded as `dtype`: all but the embedding, of which a pass reads a few rows only.

    An embedding that is the head as well is read as a whole. Raises ValueError for a folder without safetensors.
    """
    elements: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  (no dictionary)
                elements[name] = _product(weights.get_slice(name).get_shape())
    if not elements:
        raise ValueError(f"{folder} holds no weights (*.safetensors)")
    tied = not any(name.endswith(_HEAD) for name in elements)
    read = sum(count for name, count in elements.items() if tied or not name.endswith(_EMBEDDING))
    return read * getattr(torch, dtype).itemsize


def _product(sizes: list[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gpu(device: torch.device) -> dict[str, object]:
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    name = f"{properties.name}, {properties.total_memory >> 20} MiB"
    return {"gpus": [name], "cuda": torch.version.cuda}
