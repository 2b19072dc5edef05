"""The device: what it is, how fast it reads and multiplies, and how long work on it takes."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence

import torch

_PROBE_BYTES = {"cpu": 64 << 20, "cuda": 4 << 30}
_PRODUCT_SIZE = {"cpu": 256, "cuda": 8192}
_DEVICE = re.compile(r"cpu|cuda(:(?P<number>\d+))?")


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


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of a sum over a large tensor, which hardly writes."""
    numbers = torch.ones(_PROBE_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    return numbers.nbytes / seconds_of(numbers.sum, device)


def product_rate(device: torch.device) -> float:
    """Operations a second of a large bfloat16 product of random numbers."""
    size = _PRODUCT_SIZE[device.type]
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: one @ other, device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Median of several runs after two that are not counted."""
    samples = []
    for _ in range(9):
        wait_for(device)
        started = time.perf_counter()
        work()
        wait_for(device)
        samples.append(time.perf_counter() - started)
    return statistics.median(samples[2:])


def graphed_seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Seconds of one of the calls on average, all of them captured in a graph, so that no launch is waited for; on a
    CPU one after the other."""
    if device.type != "cuda":
        return seconds_of(lambda: [call() for call in calls], device) / len(calls)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    samples = []
    for _ in range(6):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        samples.append(first.elapsed_time(last) / 1000)
    return statistics.median(samples[1:]) / len(calls)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_gib(device: torch.device) -> dict[str, float]:
    """What this process has reserved and what is free; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "reserved_gib": torch.cuda.memory_reserved(device) / 2**30,
        "peak_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        "free_gib": torch.cuda.mem_get_info(device)[0] / 2**30,
    }


def describe_gpu(device: torch.device) -> dict[str, object]:
    """The one GPU that is used; nothing for a CPU."""
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    name = f"{properties.name}, {properties.total_memory >> 20} MiB, {properties.multi_processor_count} multiprocessors"
    return {"gpus": [name], "cuda": torch.version.cuda}
